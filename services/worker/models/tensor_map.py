"""`TensorMap`: finds the tensors of a checkpoint for each parameter of a model, by name.

There are several conventions, and it accepts those that transformers accepts: names with or without the prefix of the
whole model; a tied embedding that is stored only as the head; all experts of a layer in one tensor; older and newer
names of a module.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from services.worker.checkpoint.config_json import UnsupportedByFamily
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.share import Share
from services.worker.models.spec import DecoderSpec, Parts, WeightNames, parameter_shapes
from shared.errors import ModelError
from shared.gguf.tensor_data import Region

_MAX_MISSING = 1000  # stop here: with a wrong number of layers or experts, millions may be missing


class SourceTensor(NamedTuple):
    """A tensor of the checkpoint, or one expert's part of it, and its parts in the layout of our parameters."""

    name: str
    parts: Parts
    expert: int | None = None  # its index, if the tensor holds all experts of a layer
    experts: int = 0  # the number of experts in that tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return concatenated_shape(self.parts)


class Piece(NamedTuple):
    """The part of a checkpoint's tensor that a rank loads."""

    name: str
    region: Region  # in the layout of our parameters
    stored: Region  # the same, in the tensor as it is stored, which may be a stack of experts
    transposed: bool  # the checkpoint has the transpose

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(side.stop - side.start for side in self.region)


@dataclass(frozen=True)
class ParameterSource:
    """The tensors that are concatenated along the first dimension to make a parameter."""

    tensors: list[SourceTensor]
    transposed: bool = False  # the checkpoint has their transposes

    def pieces(self, share: Share) -> list[Piece]:
        """Return what a rank has of the tensors, in order."""
        return [self._piece(tensor, region) for tensor in self.tensors for region in share.regions(tensor.parts)]

    def stored_shape(self, tensor: SourceTensor) -> tuple[int, ...]:
        """Return the shape that the checkpoint must have for `tensor`."""
        shape = tensor.shape[::-1] if self.transposed else tensor.shape
        return shape if tensor.expert is None else (tensor.experts, *shape)

    def _piece(self, tensor: SourceTensor, region: Region) -> Piece:
        stored = region[::-1] if self.transposed else region
        if tensor.expert is not None:
            stored = (slice(tensor.expert, tensor.expert + 1), *stored)
        return Piece(tensor.name, region, stored, self.transposed)


class TensorMap:
    """The source of each parameter of `spec`, in `sources`. It reads no tensors and checks no shapes.

    The constructor raises ModelError naming the first tensor that is missing. It is an UnsupportedByFamily if unknown
    tensors have as many elements as the missing ones: they may be the same weights under other names.
    """

    def __init__(self, files: WeightFiles, spec: DecoderSpec, names: WeightNames) -> None:
        self.spec = spec
        self._files, self._family = files, names
        self._names = _TensorNames(files.names, names, tied=spec.tied)
        self.sources: Mapping[str, ParameterSource] = self._find_sources()

    def separate_head(self) -> tuple[str, str] | None:
        """Return the names (head, embedding) if the model is tied but the checkpoint has both tensors; else None."""
        head, embedding = self._names.find(self._names.head), self._names.find(self._names.embedding)
        return (head, embedding) if self.spec.tied and self._names.head in self._names and head != embedding else None

    def untied(self) -> "TensorMap":
        """Return the map of the same model, not tied."""
        return TensorMap(self._files, replace(self.spec, tied=False), self._family)

    def unused(self) -> list[str]:
        """Return the tensors that the model does not use, except a head that is a copy of the embedding."""
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
            names = list(dict.fromkeys(missing))  # without duplicates: one tensor may hold all experts
            others = "many" if len(missing) > _MAX_MISSING else len(names) - 1
            error = UnsupportedByFamily if self._may_be_renamed() else ModelError
            raise error(f"tensor {names[0]} is missing" + (f" (and {others} more)" if others else ""))
        return sources

    def _may_be_renamed(self) -> bool:
        """Return whether the tensors that the model does not use have as many elements as the missing ones."""
        total = sum(math.prod(self._files.shape(name)) for name in self._files.names)
        used: set[str] = set()
        needed = 0
        for tensor in (tensor for _, source in self._list_sources() for tensor in source.tensors):
            if tensor.name in self._files:
                used.add(tensor.name)
            else:
                needed += math.prod(tensor.shape)
            if needed > total:  # with a wrong number of layers, counting to the end may take long
                return False
        return needed <= sum(math.prod(self._files.shape(name)) for name in self._names.others(used))

    def _list_sources(self) -> Iterator[tuple[str, ParameterSource]]:
        """Yield each parameter and its source. Sources of missing tensors have the names that those would have."""
        for parameter, parts in parameter_shapes(self.spec):
            module, kind = parameter.rsplit(".", 1)
            modules, transposed = checkpoint_modules(module, self._family)
            names = [f"{name}.{kind}" for name in modules]
            if stack := self._stack_of_experts(module, names, parts):
                yield parameter, ParameterSource([stack])
                continue
            stored = parts_of_modules(parts, len(modules))
            tensors = [SourceTensor(self._names.find(name), own) for name, own in zip(names, stored, strict=True)]
            transposed = transposed and kind == "weight" and not self._files.outputs_first(tensors[0].name)
            yield parameter, ParameterSource(tensors, transposed)

    def _stack_of_experts(self, module: str, names: list[str], parts: Parts) -> SourceTensor | None:
        """Return an expert's part of the tensor with all experts of its layer; None if there is no such tensor."""
        stacks = self._family.stacked_experts
        match module.split("."):
            case ["layers", layer, "experts", number, part] if f"experts.{part}" in stacks:
                stack = self._family.layer.format(layer) + stacks[f"experts.{part}"]
                experts = self.spec.layers[int(layer)].experts
                if experts is None or not self._names.is_stacked(stack, names):
                    return None
                return SourceTensor(self._names.find(stack), parts, int(number), experts.count)
            case _:
                return None


def concatenated_shape(parts: Parts) -> tuple[int, ...]:
    """Return the shape of the parts of a parameter, concatenated."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def parts_of_modules(parts: Parts, modules: int) -> list[Parts]:
    """Return the parts of a parameter that each of the checkpoint's modules for it has: one each, or one has all."""
    return [parts] if modules == 1 else [[part] for part in parts]


def checkpoint_modules(module: str, names: WeightNames) -> tuple[tuple[str, ...], bool]:
    """Return the family's names, without prefix, for a module of ours, and whether their weights are transposed."""
    match module.split("."):
        case ["head"]:
            return (names.head,), False
        case ["layers", layer, *path]:
            expert = path[1] if len(path) == 3 else ""  # path: experts, index, up or down
            part = ".".join(name for name in path if not name.isdecimal())
            prefix = names.layer.format(layer)
            return tuple(prefix + name.format(expert) for name in names.layer_modules[part]), part in names.transposed
        case _:
            return (names.modules[module],), False


class _TensorNames:
    """Maps a family's names of tensors to the names in a checkpoint."""

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
        """Return the name of `name` in the checkpoint. If it is missing, return the name that it would have."""
        if name in self._stored:
            return self._stored[name]
        for theirs, ours in self._family.renamed.items():
            if ours in name and any(theirs in other for other in self._all):
                name = name.replace(ours, theirs)
        return name if name == self.head else self._prefix + name

    def is_stacked(self, stack: str, parts: Iterable[str]) -> bool:
        """Return whether the tensor `stack` holds all experts of a layer, rather than one tensor each, `parts`."""
        if stack in self._stored:
            return True
        return self._has_stacks and not any(part in self._stored for part in parts)

    def others(self, used: set[str]) -> Iterator[str]:
        """Yield the tensors that are not `used`, except those that the family ignores."""
        ignored_suffixes, unsupported_prefixes = self._family.ignored_suffixes, self._family.unsupported_prefixes
        for name in self._all:
            if not (name in used or name.endswith(ignored_suffixes) or name.startswith(unsupported_prefixes)):
                yield name

    def _family_name(self, name: str) -> str:
        for theirs, ours in self._family.renamed.items():
            name = name.replace(theirs, ours)
        return name
