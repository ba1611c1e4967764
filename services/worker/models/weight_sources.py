"""`list_sources`: the tensors of a checkpoint that make each parameter of a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.spec import DecoderSpec, WeightNames, parameter_shapes
from services.worker.models.tensor_names import TensorNames


class Part(NamedTuple):
    """One tensor of the checkpoint, or one expert's share of it, and its shape as our parameters have it."""

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None  # which, of a tensor that holds all experts of a layer
    experts: int = 0  # how many that tensor must hold


@dataclass(frozen=True)
class Source:
    """The origin of a parameter: tensors that are stacked along the first dimension."""

    parts: list[Part]
    transposed: bool = False  # the checkpoint has them the other way round

    def stored_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape that the checkpoint must have for `part`'s tensor."""
        shape = part.shape[::-1] if self.transposed else part.shape
        return shape if part.expert is None else (part.experts, *shape)


def list_sources(
    files: WeightFiles, spec: DecoderSpec, names: WeightNames, where: TensorNames
) -> Iterator[tuple[str, Source]]:
    """Yield each parameter of `spec`, and the tensors that make it, missing ones under the names they would have."""
    for parameter, shapes in parameter_shapes(spec):
        module, kind = parameter.rsplit(".", 1)
        modules, transposed = _modules(module, names)
        if len(modules) == 1:  # on disk they are stacked already
            shapes = [(sum(shape[0] for shape in shapes), *shapes[0][1:])]
        tensors = [f"{name}.{kind}" for name in modules]
        if stacked := _stacked(module, tensors, shapes, spec, names, where):
            yield parameter, Source([stacked])
            continue
        parts = [Part(where.find(tensor), shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        transposed = transposed and kind == "weight" and not files.outputs_first(parts[0].tensor)
        yield parameter, Source(parts, transposed)


def _stacked(
    module: str,
    tensors: list[str],
    shapes: list[tuple[int, ...]],
    spec: DecoderSpec,
    names: WeightNames,
    where: TensorNames,
) -> Part | None:
    """Return an expert's share of the tensor that holds all experts of its layer, if the checkpoint has it so."""
    match module.split("."):
        case ["layers", layer, "experts", number, part] if f"experts.{part}" in names.stacked_experts:
            stack = names.layer.format(layer) + names.stacked_experts[f"experts.{part}"]
            experts = spec.layers[int(layer)].experts
            if experts is None or not where.is_stacked(stack, tensors):
                return None
            shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            return Part(where.find(stack), shape, int(number), experts.count)
        case _:
            return None


def _modules(module: str, names: WeightNames) -> tuple[tuple[str, ...], bool]:
    """The family's modules of one of ours, without a prefix, and whether their weights are transposed."""
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
