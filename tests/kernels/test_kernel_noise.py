"""Philox against its authors' vectors, and the noise made of it."""

import math

import pytest
import torch

from kernels.reference.gumbel import philox, token_noise

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c = tuple(torch.tensor([word]) for word in counter)
    k = tuple(torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c[0], c[1], c[2], c[3]), (k[0], k[1]))) == words


def noise(seed: int, sample: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    one = torch.ones(1, dtype=torch.int64)
    return token_noise(one * seed, one * sample, one * position, tokens)


def test_noise_is_gumbel() -> None:
    got = noise(7, 0, 3, torch.arange(200_000))
    assert abs(got.mean().item() - 0.5772) < 0.01
    assert abs(got.std().item() - math.pi / math.sqrt(6)) < 0.01
    assert got.abs().max() < 16.64


def test_every_part_of_the_key_matters() -> None:
    tokens = torch.arange(50)
    base = noise(7, 0, 3, tokens)
    changed = [noise(8, 0, 3, tokens), noise(7 + 2**32, 0, 3, tokens), noise(7, 1, 3, tokens), noise(7, 0, 4, tokens)]
    for other in changed:
        assert (other != base).all()
    assert torch.equal(noise(7, 0, 3, tokens), base)
    assert torch.equal(noise(7, 0, 3, tokens[30:31]), base[30:31])


def test_seeds_are_any_64_bits() -> None:
    seeds = [0, -1, -(2**63), 2**63 - 1]
    noises = {tuple(noise(seed, 0, 0, torch.arange(4)).tolist()) for seed in seeds}
    assert len(noises) == len(seeds)
