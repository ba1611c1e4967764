"""`TensorMap`: the tensors of a checkpoint that make each parameter of a model, found by their names.

There are several conventions for these names, and all that transformers takes is taken: tensors with or without the
prefix of the whole model, one by one; a tied table under the name of the head alone; all experts of a layer in one
tensor; the newer and the older name of a module.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from services.worker.checkpoint.config_json import UnsupportedByFamily
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.spec import DecoderSpec, WeightNames, parameter_shapes
from shared.errors import ModelError

_MAX_MISSING = 1000  # that are counted; a wrong number of layers or experts may make it millions


class SourceTensor(NamedTuple):
    """A tensor of the checkpoint, or one expert's share of it, and its shape as our parameters have it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None  # which, of a tensor that holds all experts of a layer
    experts: int = 0  # how many that tensor must hold


@dataclass(frozen=True)
class ParameterSource:
    """The origin of a parameter: tensors that are stacked along the first dimension."""

    tensors: list[SourceTensor]
    transposed: bool = False  # the checkpoint has them the other way round

    def stored_shape(self, tensor: SourceTensor) -> tuple[int, ...]:
        """Return the shape that the checkpoint must have for `tensor`."""
        shape = tensor.shape[::-1] if self.transposed else tensor.shape
        return shape if tensor.expert is None else (tensor.experts, *shape)


class TensorMap:
    """The source of each parameter of `spec`, in `sources`. No tensor is read, and no shape looked at.

    The constructor raises ModelError naming the first tensor that is missing. It is an UnsupportedByFamily if the
    checkpoint has as many numbers for which the family knows no place: they may be the same weights under names that it
    does not know.
    """

    def __init__(self, files: WeightFiles, spec: DecoderSpec, names: WeightNames) -> None:
        self._files, self._spec, self._family = files, spec, names
        self._names = _TensorNames(files.names, names, tied=spec.tied)
        self.sources: Mapping[str, ParameterSource] = self._find_sources()

    def separate_head(self) -> tuple[str, str] | None:
        """Return the names (head, table) where a model is tied, but has a tensor for each; else None."""
        head, table = self._names.find(self._names.head), self._names.find(self._names.embedding)
        return (head, table) if self._spec.tied and self._names.head in self._names and head != table else None

    def untied(self) -> "TensorMap":
        """Return the map of the same model with a head of its own."""
        return TensorMap(self._files, replace(self._spec, tied=False), self._family)

    def unused(self) -> list[str]:
        """Return the tensors that the model has no place for, but for a head that is a copy of the table."""
        used = {tensor.name for source in self.sources.values() for tensor in source.tensors}
        head = self._names.find(self._names.head)
        return [name for name in self._names.others(used) if name != head]

    def _find_sources(self) -> dict[str, ParameterSource]:
        sources: dict[str, ParameterSource] = {}
        missing: list[str] = []
        for parameter, source in self._list_sources():
            sources[parameter] = source
            missing += [tensor.name for tensor in source.tensors if tensor.name not in self._files]
            if len(missing) > _MAX_MISSING:
                break
        if missing:
            names = list(dict.fromkeys(missing))  # one may hold all experts
            others = "many" if len(missing) > _MAX_MISSING else len(names) - 1
            error = UnsupportedByFamily if self._may_be_renamed() else ModelError
            raise error(f"tensor {names[0]} is missing" + (f" (and {others} more)" if others else ""))
        return sources

    def _may_be_renamed(self) -> bool:
        """Tell if the tensors without a place in the model have as many elements as the missing ones."""
        total = sum(math.prod(self._files.shape(name)) for name in self._files.names)
        used: set[str] = set()
        needed = 0
        for tensor in (tensor for _, source in self._list_sources() for tensor in source.tensors):
            if tensor.name in self._files:
                used.add(tensor.name)
            else:
                needed += math.prod(tensor.shape)
            if needed > total:  # a wrong number of layers would have us count for long
                return False
        return needed <= sum(math.prod(self._files.shape(name)) for name in self._names.others(used))

    def _list_sources(self) -> Iterator[tuple[str, ParameterSource]]:
        """Yield each parameter and its source; missing tensors have the names that they would have."""
        for parameter, shapes in parameter_shapes(self._spec):
            module, kind = parameter.rsplit(".", 1)
            modules, transposed = _modules(module, self._family)
            if len(modules) == 1:  # on disk they are stacked already
                shapes = [_stack_shape(shapes)]
            names = [f"{name}.{kind}" for name in modules]
            if stack := self._stack_of_experts(module, names, shapes):
                yield parameter, ParameterSource([stack])
                continue
            tensors = [SourceTensor(self._names.find(name), shape) for name, shape in zip(names, shapes, strict=True)]
            transposed = transposed and kind == "weight" and not self._files.outputs_first(tensors[0].name)
            yield parameter, ParameterSource(tensors, transposed)

    def _stack_of_experts(self, module: str, names: list[str], shapes: list[tuple[int, ...]]) -> SourceTensor | None:
        """Return an expert's share of the tensor that holds all experts of its layer, if the checkpoint has it so."""
        stacks = self._family.stacked_experts
        match module.split("."):
            case ["layers", layer, "experts", number, part] if f"experts.{part}" in stacks:
                stack = self._family.layer.format(layer) + stacks[f"experts.{part}"]
                experts = self._spec.layers[int(layer)].experts
                if experts is None or not self._names.is_stacked(stack, names):
                    return None
                return SourceTensor(self._names.find(stack), _stack_shape(shapes), int(number), experts.count)
            case _:
                return None


def _stack_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _modules(module: str, names: WeightNames) -> tuple[tuple[str, ...], bool]:
    """Return the family's modules of one of ours, without a prefix, and whether their weights are transposed."""
    match module.split("."):
        case ["head"]:
            return (names.head,), False
        case ["layers", layer, *path]:
            number = path[1] if len(path) == 3 else ""  # experts, which one, what of it
            part = ".".join(step for step in path if not step.isdecimal())
            start = names.layer.format(layer)
            return tuple(start + name.format(number) for name in names.layer_modules[part]), part in names.transposed
        case _:
            return (names.modules[module],), False


class _TensorNames:
    """The tensors of a checkpoint, by the names that a family has for them."""

    def __init__(self, stored: Iterable[str], names: WeightNames, *, tied: bool) -> None:
        self._family = names
        self._all = list(stored)
        self._stored: dict[str, str] = {}
        for prefix in names.prefixes:
            for name in self._all:
                if name.startswith(prefix):
                    self._stored.setdefault(self._family_name(name.removeprefix(prefix)), name)
        self.embedding, self.head = f"{names.modules['embedding']}.weight", f"{names.head}.weight"
        fits = (prefix for prefix in names.prefixes if prefix + self.embedding in self._all)
        self._prefix = next(fits, names.prefixes[0])
        stacks = tuple(names.stacked_experts.values())
        self._has_stacks = any(name.endswith(stacks) for name in self._stored)
        if tied and self.head in self._stored:
            self._stored.setdefault(self.embedding, self._stored[self.head])

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def find(self, name: str) -> str:
        """Return the checkpoint's spelling of `name`; for a tensor that is not there, the one that it would have."""
        if name in self._stored:
            return self._stored[name]
        for theirs, ours in self._family.renamed.items():
            if ours in name and any(theirs in other for other in self._all):
                name = name.replace(ours, theirs)
        return name if name == self.head else self._prefix + name

    def is_stacked(self, stack: str, parts: Iterable[str]) -> bool:
        """Tell if one tensor `stack` holds the experts of a layer, and not tensors of their own, `parts`."""
        if stack in self._stored:
            return True
        return self._has_stacks and not any(part in self._stored for part in parts)

    def others(self, used: set[str]) -> Iterator[str]:
        """Yield the tensors that are not `used`, without those that are known to be no part of the decoder."""
        ignored_suffixes, unsupported_prefixes = self._family.ignored_suffixes, self._family.unsupported_prefixes
        for name in self._all:
            if not (name in used or name.endswith(ignored_suffixes) or name.startswith(unsupported_prefixes)):
                yield name

    def _family_name(self, name: str) -> str:
        for theirs, ours in self._family.renamed.items():
            name = name.replace(theirs, ours)
        return name
