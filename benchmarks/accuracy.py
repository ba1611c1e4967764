"""Compare narrower types with float32, on fixed texts: Kullback-Leibler divergence, agreement of the likeliest token.

Run with `python benchmarks/accuracy.py`; it prints a table in Markdown. For each position of the texts, it compares the
model's distribution over the next token in float32 with that in each other precision. For the first token of an answer
to each of 200 chat prompts, it takes the largest error of the log-probabilities of the 20 likeliest tokens, the most
that the API reports, and prints its maximum and its mean. The embedded model's weights are
those of a GGUF file (4 bits and a head of 8), so a row `auto` differs from float32 by its activations and cache alone,
and one that rounds weights rounds them a second time.

With `--key-biases` it counts instead in how many positions tiny random Qwen2 models whose keys have large biases keep
the likeliest token in caches of narrower types.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from kernels.load import ops
from services.worker.batch import build_batch, prepare_inputs
from services.worker.config import WorkerConfig
from services.worker.models.load import load_model
from services.worker.sequence_states import SequenceStates
from services.worker.transfers import StepBuffer
from shared.hub.checkpoint import locate
from shared.protocol import Configure, Epoch, NewSequence, Row, Sampling, StepPlan, pack_tokens
from shared.text.tokenizer import Tokenizer

TEXTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris, "
    "which lies on the river Seine and has about two million people.<|im_end|>\n",
    "The theory of relativity, proposed by Albert Einstein, changed the way in which we think about space, time and "
    "gravity. It says that the laws of physics are the same for all observers who move at a constant speed.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "In the morning the old fisherman went down to the harbour, untied his boat, and rowed out past the lighthouse to "
    "where the water was deep and cold and the gulls no longer followed him.",
)
SUBJECTS = (
    "the tides", "bread", "the French Revolution", "photosynthesis", "chess", "black holes", "prime numbers", "jazz",
    "volcanoes", "the stock market", "bees", "electric cars", "Mozart", "vaccines", "the Silk Road", "recursion",
    "earthquakes", "tea", "the human heart", "glaciers",
)  # fmt: skip
QUESTIONS = (
    "Explain {} to a child.", "What is the most important fact about {}?", "Write a short poem about {}.",
    "Name three books about {}.", "Why do people care about {}?", "Can {} be dangerous? Answer yes or no.",
    "Translate the words '{}' into German.", "When did people first write about {}?", "Give me a quiz on {}.",
    "Summarise what is known of {} in one sentence.",
)  # fmt: skip
TOP_LOGPROBS = 20
PRECISIONS: tuple[dict[str, str], ...] = (
    {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
    {"dtype": "float32", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"quantization": "auto"},  # the default: in the bits of a quantised checkpoint
    {"quantization": "auto", "kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"quantization": "int4"},
)
BLOCK = 16
KEY_BIASES, POSITIONS, SEEDS = (0, 50, 100, 200, 300), 159, 4


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or file; the embedded model if left out")
    parser.add_argument("--key-biases", action="store_true", help="measure tiny models whose keys have large biases")
    options = parser.parse_args()
    key_biases() if options.key_biases else precisions(options.model)


def precisions(model: str) -> None:
    """Print the distance of each precision of `model` from float32."""
    tokenizer = Tokenizer.load(locate(model))
    texts = [tokenizer.encode(text) for text in TEXTS]
    questions = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    chats = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n") for question in questions
    ]
    exact, exact_answers = distributions(model, texts, {"dtype": "float32"}, chats)
    print(f"{len(exact)} positions, {len(chats)} chat prompts\n")
    print("| precision | KL, mean | KL, largest | the same likeliest token | first token: largest error | mean |")
    print("|---|---|---|---|---|---|")
    likeliest = exact_answers.topk(TOP_LOGPROBS).indices
    for settings in PRECISIONS:
        narrow, answers = distributions(model, texts, settings, chats)
        divergence = (exact.exp() * (exact - narrow)).sum(-1)
        agree = (narrow.argmax(-1) == exact.argmax(-1)).float().mean()
        errors = (answers - exact_answers).gather(-1, likeliest).abs().amax(-1)
        name = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings.items())
        cells = (
            f"{divergence.mean():.1e} | {divergence.max():.1e} | {agree:.1%} | {errors.max():.2f} | {errors.mean():.3f}"
        )
        print(f"| `{name}` | {cells} |", flush=True)


def key_biases() -> None:
    """Print the number of positions whose likeliest token is kept, a row for each size of biases."""
    caches = ("bfloat16", "int8")
    print(f"| biases of keys | {' | '.join(caches)} |\n|---|---|---|")
    for size in KEY_BIASES:
        kept: dict[str, list[int]] = {cache: [] for cache in caches}
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                tokens = [save_biased(Path(folder), size, seed)]
                best = {
                    cache: distributions(folder, tokens, {"dtype": "float32", "kv_cache_dtype": cache})[0].argmax(-1)
                    for cache in ("float32", *caches)
                }
            for cache in caches:
                kept[cache].append(int((best[cache] == best["float32"]).sum()))
        print(f"| {size} | {' | '.join(f'{min(n)} to {max(n)}' for n in kept.values())} |", flush=True)


def save_biased(folder: Path, size: float, seed: int) -> Sequence[int]:
    """Save a tiny Qwen2 whose keys have biases of about `size`, of both signs; return tokens of a text for it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=131, max_position_embeddings=256, initializer_range=0.3, **sizes, **heads)
    model = Qwen2ForCausalLM(config)
    for name, bias in model.named_parameters():
        if name.endswith("k_proj.bias"):
            bias.data = torch.randn(bias.shape).sign() * size * (0.5 + torch.rand(bias.shape))
    model.save_pretrained(folder)
    return torch.randint(3, 131, (POSITIONS,)).tolist()


@torch.inference_mode()
def distributions(
    model: str, texts: Sequence[Sequence[int]], settings: dict[str, str], prompts: Sequence[Sequence[int]] = ()
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (positions of all texts, V), and those of what follows each prompt (prompts, V)."""
    device = torch.device("cpu")
    kernels = ops(device)
    loaded = load_model(locate(model), WorkerConfig(model=model, device="cpu", **settings), device, kernels)
    shape, longest = loaded.model.shape, max(map(len, [*texts, *prompts]))
    blocks = -(-longest // BLOCK)
    layout = kernels.kv_layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK, loaded.precision.kv_dtype)
    storage = layout.allocate(blocks, device)
    epoch = Epoch(boot_id="accuracy", count=1)
    logprobs: list[Tensor] = []
    for text in [*texts, *prompts]:
        sizes = Configure(epoch, BLOCK, blocks, 1, blocks * BLOCK, longest)
        state = SequenceStates(sizes, shape.vocab_size, device)
        loaded.model.prepare_positions(blocks * BLOCK + 1)
        sequence = NewSequence(0, pack_tokens(text), len(text), list(range(blocks)), Sampling(1, 0), 0)
        plan = StepPlan(epoch, 0, [Row(0, 0, len(text), 0)], new_sequences=[sequence])
        changes = state.stage(plan, StepBuffer(device))
        rows = build_batch(plan.rows).stage(state, changes)
        changes.apply(kernels)
        inputs = prepare_inputs(rows, len(text), state, layout.num_kv_heads, kernels)
        hidden = loaded.model.forward(inputs, layout.views(storage))
        wanted = hidden if len(logprobs) < len(texts) else hidden[-1:]
        logprobs.append(loaded.model.logits(wanted).log_softmax(-1))
    return torch.cat(logprobs[: len(texts)]), torch.cat(logprobs[len(texts) :] or [torch.empty(0, shape.vocab_size)])


if __name__ == "__main__":
    main()
