"""The draw of one row, written as it is defined."""

import torch
from torch import Tensor

from kernels.reference.gumbel import REACH, TAIL, token_noise


def draw_by_levels(z: Tensor, seed: int, sample: int, position: int) -> int:
    """Return a token of softmax(z): the best of the noised likely ones, unless the rest together beats them."""

    def noise(tokens: Tensor) -> Tensor:
        return token_noise(torch.tensor([seed]), torch.tensor([sample]), torch.tensor([position]), tokens)

    ids, level = torch.arange(len(z)), 0
    while True:
        z = z - z.max()
        likely = z >= -REACH
        score = z[likely].double() + noise(ids[likely])
        rest = z[~likely].double().exp().sum().log() + noise(torch.tensor([TAIL + level]))
        if rest <= score.max():
            return int(ids[likely][score == score.max()].min())
        z, ids, level = z[~likely], ids[~likely], level + 1
