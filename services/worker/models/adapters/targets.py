"""The modules of a family's checkpoints that adapters can change, and the operations that compute them.

They follow from the spec and the names of weights, so a family needs no code of its own for adapters: an operation may
compute several modules, such as the projections of queries, keys and values, and each of them is a part of it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from services.worker.models.spec import DecoderSpec, WeightNames, parameter_shapes
from services.worker.models.tensor_map import checkpoint_modules, concatenated_shape

OPERATIONS = ("qkv", "out", "up", "down")
"""The linear operations of a layer without experts, by the names of their parameters."""


class LoraTarget(NamedTuple):
    """A linear module of the checkpoint."""

    operation: str  # the parameter that holds its weight, without `.weight`
    part: int  # its place among the modules of the operation
    outputs: int
    inputs: int


class LoraTargets(NamedTuple):
    """The modules of a model, by their names in the checkpoint without the prefix of the whole model."""

    modules: Mapping[str, LoraTarget]
    unsupported: frozenset[str]  # modules that adapters of other engines may change, such as the embedding
    prefixes: tuple[str, ...]  # that names may begin with

    @property
    def operations(self) -> dict[str, list[LoraTarget]]:
        """The parts of each operation, in order."""
        parts: dict[str, list[LoraTarget]] = {}
        for target in self.modules.values():
            parts.setdefault(target.operation, []).append(target)
        return parts


def find_targets(spec: DecoderSpec, names: WeightNames) -> LoraTargets:
    """Return the modules of a model that adapters can change."""
    modules = dict(_linear_modules(spec, names))
    others = {name for module in _matrices(spec) for name in checkpoint_modules(module, names)[0]}
    return LoraTargets(modules, frozenset({*others, names.head} - set(modules)), names.prefixes)


def _linear_modules(spec: DecoderSpec, names: WeightNames) -> Iterator[tuple[str, LoraTarget]]:
    for parameter, shapes in parameter_shapes(spec):
        operation, kind = parameter.rsplit(".", 1)
        _, layer, *path = (*operation.split("."), "")
        if kind != "weight" or not layer.isdecimal() or path[0] not in OPERATIONS:
            continue
        module_names, _ = checkpoint_modules(operation, names)
        parts = shapes if len(module_names) > 1 else [concatenated_shape(shapes)]
        for part, (name, (outputs, inputs)) in enumerate(zip(module_names, parts, strict=True)):
            yield name, LoraTarget(operation, part, outputs, inputs)


def _matrices(spec: DecoderSpec) -> Iterator[str]:
    """Yield the modules of ours that have a matrix."""
    for parameter, shapes in parameter_shapes(spec):
        if len(shapes[0]) > 1:
            yield parameter.removesuffix(".weight")
