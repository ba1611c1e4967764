"""`TransformersModel`: a `CausalLM` computed by transformers' code. It is checked on a few tokens when it is loaded."""

import copy
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.ops import Ops
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.causal_lm import Inputs, ModelShape
from services.worker.models.fallback.attention import AttentionCall, PagedAttention, Recorder, register, registered
from services.worker.models.fallback.build import build_model, first_line, silenced
from services.worker.models.fallback.linear import pack_modules
from services.worker.models.fallback.max_positions import max_positions
from services.worker.models.sanity_check import check_finite, refuse_if_different, sanity_check_tokens
from shared.errors import ModelError


@torch.inference_mode()
def load(
    folder: Path, architecture: str, files: WeightFiles | None, dtype: torch.dtype, device: torch.device, ops: Ops
) -> "TransformersModel":
    """Load and check the model in `folder`. Without `files` its weights are random. Raise ModelError if it fails."""
    model = build_model(folder, architecture, files, dtype, device)
    try:
        with silenced():
            return _with_paged_attention(model, architecture, dtype, ops)
    except ModelError as error:
        raise ModelError(f"{architecture} cannot be served through transformers: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # hundreds of models' code runs here, and may raise anything
        raise ModelError(f"{architecture} cannot be served through transformers: {first_line(error)}") from error


def _with_paged_attention(model: Any, architecture: str, dtype: torch.dtype, ops: Ops) -> "TransformersModel":
    if not model._can_set_attn_implementation():
        raise ModelError("its attention cannot be replaced")
    body = _body_name(model)
    tokens = sanity_check_tokens(model.config.get_text_config().vocab_size)
    ids = torch.tensor([tokens], device=model.device)
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    check_finite(expected, dtype)
    positions = max_positions(model.config)
    calls, output_type = _record_calls(model, body, ids, positions)
    shape = ModelShape(
        architecture=architecture,
        vocab_size=expected.shape[-1],
        max_positions=positions,
        num_layers=len(calls),
        num_kv_heads=max(call.num_kv_heads for call in calls),
        head_dim=max(max(call.key_dim, call.value_dim) for call in calls),
    )
    pack_modules(model, ops)
    attention = PagedAttention(calls, ops)
    name, unregister = register(attention)
    model.set_attn_implementation(name)
    wrapped = TransformersModel(model, body, attention, shape, output_type)
    weakref.finalize(wrapped, unregister)
    refuse_if_different(wrapped, tokens, expected, dtype, ops)
    return wrapped


def _record_calls(model: Any, body: str, ids: Tensor, positions: int) -> tuple[list[AttentionCall], type]:
    """Run the model's body on `ids` (1, T). Return its calls of attention, and the type of its outputs."""
    recorder = Recorder(positions)
    with registered(recorder) as name:
        model.set_attn_implementation(name)
        outputs = getattr(model, body)(input_ids=ids, use_cache=False)
    if not recorder.calls:
        raise ModelError("its attention cannot be replaced")
    return recorder.calls, type(outputs)


class TransformersModel:
    """A `CausalLM` around a model of transformers. Its module `body` computes hidden states by calls of `attention`."""

    def __init__(self, model: Any, body: str, attention: PagedAttention, shape: ModelShape, output_type: type) -> None:
        self._body = getattr(model, body)
        self._attention = attention
        self._shape = shape
        self._output_type = output_type  # that the body returns
        self._stub = _Stub()
        self._head = copy.copy(model)  # shares everything but the body
        self._head._modules = {**model._modules, body: self._stub}

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def prepare_positions(self, length: int) -> None:
        """Do nothing: the model computes angles in each step, and the length of a learned table is fixed."""

    def forward(self, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the hidden states (N, H) of `inputs.outputs`. Keys and values go to `caches`, a pair for each call."""
        with self._attention.step(inputs, caches):
            outputs = self._body(
                input_ids=inputs.tokens[None].long(), position_ids=inputs.positions[None], use_cache=False
            )
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden if inputs.outputs is None else hidden.index_select(0, inputs.outputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, V) float32 of hidden states (N, H), by the model's code with a stub as its body."""
        self._stub.outputs = self._output_type(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._head(input_ids=ids, use_cache=False).logits
        finally:
            self._stub.outputs = None
        return logits[0].float()


class _Stub(nn.Module):
    """A module in place of the body, which returns the `outputs` that were set."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: Any = None

    @property
    def decoder(self) -> "_Stub":
        """This module too, for models that look for a decoder in their body."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.outputs


def _body_name(model: Any) -> str:
    """Return the name of the module of a causal model that computes hidden states."""
    for name in (model.base_model_prefix, "model", "transformer"):
        if name in model._modules:
            return str(name)
    raise ModelError("it has no separate body under its head")
