"""`ParallelConfig`: the place of a rank among those that compute one model together."""

from typing import NamedTuple

from shared.errors import ModelError


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
    def stage(self) -> int:
        """The number of the pipeline stage whose layers this rank has."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def sampling_rank(self) -> int:
        """The rank that samples tokens and reports them to the scheduler: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def check_divisible(self, name: str, value: int) -> None:
        """Raise `ModelError` if the ranks of a stage cannot divide a size of the model, called `name`."""
        size = self.tensor_parallel_size
        if value % size:
            raise ModelError(f"--tensor-parallel-size {size}: the model's {name}, {value}, cannot be divided by it")

    def check_num_layers(self, num_layers: int) -> None:
        """Raise `ModelError` if the model has fewer layers than there are stages."""
        stages = self.pipeline_parallel_size
        if stages > num_layers:
            raise ModelError(f"--pipeline-parallel-size {stages}: the model has {num_layers} layers, fewer than stages")


ONE_RANK = ParallelConfig()
"""The place of a rank that computes a model alone."""
