"""`ParallelConfig`: the place of a rank among those that compute one model together, and where they meet."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigError, ModelError

MAX_TENSOR_PARALLEL_SIZE = 1024


class ParallelConfig(NamedTuple):
    """How many ranks share a model, and which of them this is."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        """The number of the part of each layer that this rank has."""
        return self.rank % self.tensor_parallel_size

    @property
    def pp_rank(self) -> int:
        """The number of the pipeline stage whose layers this rank has."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pipeline_parallel_size - 1

    @property
    def sampling_rank(self) -> int:
        """The rank that samples tokens and reports them to the scheduler: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def check_divisible(self, sizes: Mapping[str, int]) -> None:
        """Raise `ModelError` if the ranks of a stage cannot divide all these sizes of the model, which have names."""
        size, common = self.tensor_parallel_size, math.gcd(*sizes.values())
        if common % size == 0:
            return
        name, value = next((name, value) for name, value in sizes.items() if value % size)
        taken = [str(number) for number in range(1, min(common, MAX_TENSOR_PARALLEL_SIZE) + 1) if common % number == 0]
        raise ModelError(
            f"--tensor-parallel-size {size}: the model's {name}, {value}, cannot be divided by it; this model takes "
            f"{', '.join(taken)}"
        )

    def check_num_layers(self, num_layers: int) -> None:
        """Raise `ModelError` if the model has fewer layers than there are stages."""
        stages = self.pipeline_parallel_size
        if stages > num_layers:
            raise ModelError(f"--pipeline-parallel-size {stages}: the model has {num_layers} layers, fewer than stages")


ONE_RANK = ParallelConfig()
"""The place of a rank that computes a model alone."""


def parse_rendezvous(rendezvous: str) -> tuple[str, int] | Path:
    """Return the host and port, or the folder, where ranks find each other. Raise ConfigError if it is neither."""
    host, separator, port = rendezvous.rpartition(":")
    if separator and port.isdecimal():
        return host.strip("[]"), int(port)
    if not rendezvous or not Path(rendezvous).is_dir():
        raise ConfigError(
            f"--rendezvous {rendezvous!r} is neither host:port, with the host of rank 0, nor a folder; a model that "
            "several ranks compute needs one, the same for all of them"
        )
    return Path(rendezvous)
