"""The models that are measured: the embedded one, and Llamas of larger shapes whose weights are random.

Speed does not depend on what weights say. The shapes are those of Llama 3.2 1B and Llama 3.1 8B, with the embedded
model's tokenizer and so its vocabulary, which makes the second 7.4 billion weights.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_POSITION = 8192


class Shape(NamedTuple):
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool  # the head's weights are the embedding's

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": MAX_POSITION,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def layer(self, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor of a layer: of a matrix (outputs, inputs)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, shape in (
            ("input_layernorm", (self.hidden,)),
            ("self_attn.q_proj", (queries, self.hidden)),
            ("self_attn.k_proj", (keys, self.hidden)),
            ("self_attn.v_proj", (keys, self.hidden)),
            ("self_attn.o_proj", (self.hidden, queries)),
            ("post_attention_layernorm", (self.hidden,)),
            ("mlp.gate_proj", (self.feed_forward, self.hidden)),
            ("mlp.up_proj", (self.feed_forward, self.hidden)),
            ("mlp.down_proj", (self.hidden, self.feed_forward)),
        ):
            yield f"model.layers.{number}.{name}.weight", shape

    def ends(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors outside the layers: embedding, norm and, unless tied, head."""
        table = (self.vocabulary, self.hidden)
        yield "model.embed_tokens.weight", table
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", table


class Model(NamedTuple):
    """A model that is measured."""

    key: str  # what `--model` and the result file call it
    title: str
    shape: Shape | None  # of random weights; None: the embedded model


SMALL = Model("135m", "SmolLM2-135M-Instruct, the embedded model", None)
MIDDLE = Model(
    "1b", "a Llama of 1.07 billion random weights", Shape(2048, 16, 32, 8, 64, 8192, vocabulary=49152, tied=True)
)
LARGE = Model(
    "8b", "a Llama of 7.4 billion random weights", Shape(4096, 32, 32, 8, 128, 14336, vocabulary=49152, tied=False)
)

MODELS = {model.key: model for model in (SMALL, MIDDLE, LARGE)}
