"""`SamplingMetadata`: the sampling parameters of the tokens of one step."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SamplingMetadata:
    """The sampling parameters of N tokens: arrays (N,) on the host, since they decide which operations run."""

    rows: Ints  # index of the row of logits from which each token is sampled
    temperature: Floats
    top_k: Ints  # 0: off
    top_p: Floats  # in (0, 1]
    min_p: Floats  # in [0, 1]
    seeds: Ints  # any 64 bits
    samples: Ints  # index of the sample among the request's
    positions: Ints  # output positions: index of the token after the prompt, from 0
    masks: Ints  # index of the mask of tokens that may be sampled; -1: any token

    def subset(self, mask: Bools) -> "SamplingMetadata":
        return SamplingMetadata(*(getattr(self, field.name)[mask] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.rows)
