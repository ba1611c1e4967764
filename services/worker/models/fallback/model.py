"""A model of transformers as the rest of the worker wants one: it is built, tried, and then asked step by step."""

import copy
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.ops import Ops
from services.worker.checkpoint.weight_files import WeightFiles
from services.worker.models.causal_lm import Inputs, Shape
from services.worker.models.fallback.attention import Call, PagedAttention, Recorder, register, registered
from services.worker.models.fallback.build import build, first_line, quiet
from services.worker.models.fallback.context import max_positions
from services.worker.models.fallback.linear import pack_modules
from services.worker.models.sanity_check import check_finite, refuse_if_different, trial_tokens
from shared.errors import ModelError


@torch.inference_mode()
def load(
    folder: Path, architecture: str, files: WeightFiles | None, dtype: torch.dtype, device: torch.device, ops: Ops
) -> "ThroughTransformers":
    """The model in `folder`, tried. Without `files` its weights are random. Raises ModelError if it can't be served."""
    model = build(folder, architecture, files, dtype, device)
    try:
        with quiet():
            return _tried(model, architecture, dtype, ops)
    except ModelError as error:
        raise ModelError(f"{architecture} cannot be served through transformers: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # hundreds of models' code runs here, and may raise anything
        raise ModelError(f"{architecture} cannot be served through transformers: {first_line(error)}") from error


def _tried(model: Any, architecture: str, dtype: torch.dtype, ops: Ops) -> "ThroughTransformers":
    if not model._can_set_attn_implementation():
        raise ModelError("its attention cannot be replaced")
    body = _body_name(model)
    tokens = trial_tokens(model.config.get_text_config().vocab_size)
    ids = torch.tensor([tokens], device=model.device)
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    check_finite(expected, dtype)
    positions = max_positions(model.config)
    calls, outputs = _recorded(model, body, ids, positions)
    shape = Shape(
        architecture=architecture,
        vocab_size=expected.shape[-1],
        max_positions=positions,
        num_layers=len(calls),
        num_kv_heads=max(call.kv_heads for call in calls),
        head_dim=max(max(call.key_dim, call.value_dim) for call in calls),
    )
    pack_modules(model, ops)
    attention = PagedAttention(calls, ops)
    name, forget = register(attention)
    model.set_attn_implementation(name)
    served = ThroughTransformers(model, body, attention, shape, outputs)
    weakref.finalize(served, forget)
    refuse_if_different(served, tokens, expected, dtype, ops)
    return served


def _recorded(model: Any, body: str, ids: Tensor, positions: int) -> tuple[list[Call], type]:
    """What the model asks of its attention, call by call, and the type of what its body gives."""
    recorder = Recorder(positions)
    with registered(recorder) as name:
        model.set_attn_implementation(name)
        outputs = getattr(model, body)(input_ids=ids, use_cache=False)
    if not recorder.calls:
        raise ModelError("its attention cannot be replaced")
    return recorder.calls, type(outputs)


class ThroughTransformers:
    """A `CausalLM` around a model of transformers that calls `attention`, and whose `body` gives hidden states."""

    def __init__(self, model: Any, body: str, attention: PagedAttention, shape: Shape, outputs: type) -> None:
        self._body = getattr(model, body)
        self._attention = attention
        self._shape = shape
        self._outputs = outputs  # the type of what the body gives
        self._stub = _Stub()
        self._head = copy.copy(model)  # shares all but the body
        self._head._modules = {**model._modules, body: self._stub}

    @property
    def shape(self) -> Shape:
        return self._shape

    def reach(self, length: int) -> None:
        """Nothing to do: the model computes angles as it needs them, and a learned table has its length."""

    def forward(self, inputs: Inputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states (T, H) of all tokens; their keys and values are put in `caches`, one pair a call."""
        with self._attention.step(inputs, caches):
            found = self._body(
                input_ids=inputs.tokens[None].long(), position_ids=inputs.positions[None], use_cache=False
            )
        hidden: Tensor = found.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, V) float32 of hidden states (N, H): all that the model does behind its body, by its own code."""
        self._stub.answer = self._outputs(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            found: Tensor = self._head(input_ids=ids, use_cache=False).logits
        finally:
            self._stub.answer = None
        return found[0].float()


class _Stub(nn.Module):
    """Stands where the body was, and gives what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Any = None

    @property
    def decoder(self) -> "_Stub":
        """Where some models reach into their body."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.answer


def _body_name(model: Any) -> str:
    """The module of a causal model that gives hidden states."""
    for name in (model.base_model_prefix, "model", "transformer"):
        if name in model._modules:
            return str(name)
    raise ModelError("it has no body that its head stands on")
