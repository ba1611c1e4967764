"""The modules of a family's checkpoints that adapters can change, and the operations that compute them.

They follow from the spec and the names of weights, so a family needs no code of its own for adapters: an operation may
compute several modules, such as the projections of queries, keys and values, and each of them is a part of it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from kernels.lora import LoraPart
from services.worker.models.share import Share
from services.worker.models.spec import DecoderSpec, Part, WeightNames, parameter_shapes
from services.worker.models.tensor_map import checkpoint_modules, parts_of_modules
from services.worker.parallel_config import ONE_RANK, ParallelConfig

OPERATIONS = ("qkv", "out", "up", "down")
"""The linear operations of a layer without experts, by the names of their parameters."""


class LoraTarget(NamedTuple):
    """A linear module of the checkpoint."""

    operation: str  # the parameter that holds its weight, without `.weight`
    part: int  # its place among the modules of the operation
    parts: tuple[Part, ...]  # of the parameter, that the module has

    @property
    def outputs(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].shape[1]


class LoraTargets(NamedTuple):
    """The modules of a model, by their names in the checkpoint without the prefix of the whole model."""

    modules: Mapping[str, LoraTarget]
    unsupported: frozenset[str]  # modules that adapters of other engines may change, such as the embedding
    prefixes: tuple[str, ...]  # that names may begin with
    share: Share  # what this rank has of the model

    @property
    def operations(self) -> dict[str, list[LoraTarget]]:
        """The parts of each operation that this rank's stage has, in order."""
        parts: dict[str, list[LoraTarget]] = {}
        for target in self.modules.values():
            if self.is_own(target):
                parts.setdefault(target.operation, []).append(target)
        return parts

    def is_own(self, target: LoraTarget) -> bool:
        """Return whether a module is in a layer of this rank's stage."""
        return any(self.share.parameters([f"{target.operation}.weight"]))

    def own(self, target: LoraTarget, part: LoraPart) -> LoraPart:
        """Return the rank's slices of A and B of a module: of A, the inputs that it has, and of B, the outputs."""
        a, b = part
        regions = self.share.regions(target.parts)
        return a[:, regions[0][1]], torch.cat([b[rows] for rows, _ in regions])

    def sizes(self, target: LoraTarget) -> tuple[int, int]:
        """Return how many outputs and inputs of a module this rank has."""
        regions = self.share.regions(target.parts)
        columns = regions[0][1]
        return sum(rows.stop - rows.start for rows, _ in regions), columns.stop - columns.start


def find_targets(spec: DecoderSpec, names: WeightNames, parallel: ParallelConfig = ONE_RANK) -> LoraTargets:
    """Return the modules of a model that adapters can change."""
    modules = dict(_linear_modules(spec, names))
    others = {name for module in _matrices(spec) for name in checkpoint_modules(module, names)[0]}
    unsupported = frozenset({*others, names.head} - set(modules))
    return LoraTargets(modules, unsupported, names.prefixes, Share(spec, parallel))


def _linear_modules(spec: DecoderSpec, names: WeightNames) -> Iterator[tuple[str, LoraTarget]]:
    for parameter, parts in parameter_shapes(spec):
        operation, kind = parameter.rsplit(".", 1)
        _, layer, *path = (*operation.split("."), "")
        if kind != "weight" or not layer.isdecimal() or path[0] not in OPERATIONS:
            continue
        module_names, _ = checkpoint_modules(operation, names)
        by_module = parts_of_modules(parts, len(module_names))
        for index, (name, own) in enumerate(zip(module_names, by_module, strict=True)):
            yield name, LoraTarget(operation, index, tuple(own))


def _matrices(spec: DecoderSpec) -> Iterator[str]:
    """Yield the modules of ours that have a matrix."""
    for parameter, parts in parameter_shapes(spec):
        if len(parts[0].shape) > 1:
            yield parameter.removesuffix(".weight")
