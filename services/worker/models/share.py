"""`Share`: what one rank has of a model.

Each pipeline stage has some consecutive layers; the first one also has the embedding, and the last one the output
layer. Within a stage, tensor parallel ranks divide each parameter as `parameter_shapes` says.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from services.worker.models.spec import DecoderSpec, Part
from services.worker.parallel_config import ParallelConfig
from shared.errors import ModelError
from shared.gguf.tensor_data import Region

_LAST_STAGE = ("final_norm", "project_out", "head")


class Share:
    """The part of the model `spec` that the rank `parallel` has. Raise ModelError if its sizes cannot be divided.

    `spec` is the rank's: the layers of its stage, and as many heads as it has.
    """

    def __init__(self, spec: DecoderSpec, parallel: ParallelConfig) -> None:
        _refuse_indivisible(spec, parallel)
        self.parallel = parallel
        self.layers = _stage_layers(spec, parallel)
        size = parallel.tensor_parallel_size
        self.padded_rows = -(-spec.vocab_size // size)
        """The rows of the vocabulary that each rank has; the last one may have fewer."""
        first = parallel.tp_rank * self.padded_rows
        self.vocabulary = range(first, min(first + self.padded_rows, spec.vocab_size))
        self.spec = replace(
            spec,
            layers=spec.layers[self.layers.start : self.layers.stop],
            num_heads=spec.num_heads // size,
            num_kv_heads=max(1, spec.num_kv_heads // size),
        )

    def parameters(self, names: Collection[str]) -> Iterator[str]:
        """Yield those of the model's parameters, in their order, of which this rank's stage has something."""
        for name in names:
            module, _, rest = name.partition(".")
            if module == "layers":
                is_own = int(rest.partition(".")[0]) in self.layers
            elif module in _LAST_STAGE:
                is_own = self.parallel.is_last_stage
            else:
                is_own = self.parallel.is_first_stage
                is_output_layer = module == "embedding" and "head.weight" not in names
                is_own |= is_output_layer and self.parallel.is_last_stage
            if is_own:
                yield name

    def regions(self, parts: Sequence[Part]) -> list[Region]:
        """Return what this rank has of the tensor that is the concatenation of `parts`; nothing if it has none of it.

        They follow one another in the rank's parameter.
        """
        if self.parallel.tensor_parallel_size == 1:
            return [(slice(0, sum(part.shape[0] for part in parts)), *_all_columns(parts[0]))]
        return list(self._regions(parts))

    def _regions(self, parts: Iterable[Part]) -> Iterator[Region]:
        first = 0
        for part in parts:
            rows, columns = slice(first, first + part.shape[0]), _all_columns(part)
            match part.divided:
                case "outputs":
                    rows = self._own(part.units, part.shape[0], first)
                case "inputs":
                    columns = (self._own(part.units, part.shape[1]),)
                case "vocabulary":
                    rows = slice(self.vocabulary.start, self.vocabulary.stop)
            if part.divided != "first" or self.parallel.tp_rank == 0:
                yield (rows, *columns)
            first += part.shape[0]

    def _own(self, units: int, length: int, first: int = 0) -> slice:
        """Return the rank's part of `length` numbers from `first` on, in whole units. Several ranks have the same unit
        if there are fewer units than ranks.
        """
        size, rank = self.parallel.tensor_parallel_size, self.parallel.tp_rank
        count, width = max(1, units // size), length // units
        start = first + rank * units // size * width
        return slice(start, start + count * width)


def _all_columns(part: Part) -> Region:
    return tuple(slice(0, size) for size in part.shape[1:])


def _stage_layers(spec: DecoderSpec, parallel: ParallelConfig) -> range:
    """Return the numbers of the layers of the rank's stage. If not all have as many, earlier stages have one more,
    since the last one has the output layer too.
    """
    stages = parallel.pipeline_parallel_size
    parallel.check_num_layers(spec.num_layers)
    first, end = (-(-spec.num_layers * stage // stages) for stage in (parallel.pp_rank, parallel.pp_rank + 1))
    return range(first, end)


def _refuse_indivisible(spec: DecoderSpec, parallel: ParallelConfig) -> None:
    """Raise ModelError naming a size of the model that the ranks of a stage cannot divide."""
    size = parallel.tensor_parallel_size
    sizes = {"attention heads": spec.num_heads}
    if any(layer.experts is None for layer in spec.layers):
        sizes["intermediate_size"] = spec.intermediate_size
    for layer in spec.layers:
        if layer.experts:
            sizes["intermediate size of an expert"] = layer.experts.intermediate_size
    parallel.check_divisible(sizes)
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ModelError(
            f"--tensor-parallel-size {size}: the model's heads of keys and values, {spec.num_kv_heads}, are neither a "
            "multiple nor a divisor of it"
        )
    if -(-spec.vocab_size // size) * (size - 1) >= spec.vocab_size:
        raise ModelError(f"--tensor-parallel-size {size}: the model's vocabulary, {spec.vocab_size}, is too small")
