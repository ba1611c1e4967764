"""The feed-forward block of a layer, dense or a mixture of experts."""

from collections.abc import Callable

from torch import Tensor

from kernels.decoder_layers import Expert
from kernels.lora import LoraSegments
from kernels.ops import Ops
from services.worker.models.decoder.layers import Linear, Weights
from services.worker.models.spec import Activation, DecoderSpec, Experts
from services.worker.rank_group import RankGroup


class FeedForward:
    """A feed-forward block, down(activation(up(x))). If it is gated, one matmul computes gate and up."""

    def __init__(
        self, weights: Weights, prefix: str, spec: DecoderSpec, ops: Ops, group: RankGroup | None = None
    ) -> None:
        """Without `group`, the result is what a rank's part of the inner size gives."""
        self.up = Linear(weights, f"{prefix}up", ops)
        self.down = Linear(weights, f"{prefix}down", ops, group)
        self._activation = activation(spec.activation, ops)

    def __call__(self, x: Tensor, segments: LoraSegments | None = None) -> Tensor:
        return self.down(self._activation(self.up(x, segments)), segments)

    def as_expert(self, activation: Activation) -> Expert:
        """Return the block as a value; `activation` is its activation's name."""
        return Expert(self.up.projection, self.down.projection, activation, self)


class MixtureOfExperts:
    """The weighted sum of the feed-forward blocks that a router chooses for each token.

    Each rank has a part of every expert, so one sum over the ranks is enough for all experts of a token.
    """

    def __init__(
        self, weights: Weights, prefix: str, experts: Experts, spec: DecoderSpec, ops: Ops, group: RankGroup
    ) -> None:
        self._router = Linear(weights, f"{prefix}router", ops)
        blocks = (FeedForward(weights, f"{prefix}experts.{expert}.", spec, ops) for expert in range(experts.count))
        self._experts = ops.pack_experts((block.as_expert(spec.activation) for block in blocks), experts.count)
        self._top_k, self._renormalize, self._ops, self._group = experts.top_k, experts.renormalize, ops, group

    def __call__(self, x: Tensor, _: LoraSegments | None = None) -> Tensor:
        topk_weights, topk_ids = self._ops.route(self._router(x), self._top_k, self._renormalize)
        return self._group.all_reduce(self._ops.mix_experts(x, topk_weights, topk_ids, self._experts))


def activation(name: Activation, ops: Ops) -> Callable[[Tensor], Tensor]:
    """Return the operation called `name`."""
    operations: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu_and_mul": ops.silu_and_mul,
        "gelu_tanh_and_mul": ops.gelu_tanh_and_mul,
        "gelu_tanh": ops.gelu_tanh,
        "relu": ops.relu,
    }
    return operations[name]
