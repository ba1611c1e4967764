"""Measures what a grammar costs: outputs that follow a JSON schema beside free ones of the same length, in turns.

    python -m benchmarks.structured [--streams 1 8 32] [--rounds 5] [--tokens 96] [--model FOLDER]

Prints tokens a second of both and the median of the rounds' ratios, and the same of the CPU time of a token, which
depends less on what else the machine does. Then the time that a new schema takes before the first token, and how many
tokens the grammar leaves no choice for.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from msgspec.structs import replace

from quire import LLM, SamplingParams, StructuredOutputsParams
from shared.text.grammars import GrammarCompiler, grammar_text

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 30}, "number": {"type": "integer"}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "kind", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 50}
"""Many records, so that no output is whole before its last token."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    llm = LLM(options.model, max_num_seqs=max(options.streams))
    free = SamplingParams(max_tokens=options.tokens, temperature=0.8, ignore_eos=True)
    bound = replace(free, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    print(
        "| streams | free, tok/s | by schema, tok/s | ratio | ratios of the rounds | CPU ms a token, free | by schema |"
    )
    print("|---|---|---|---|---|---|---|")
    for streams in options.streams:
        runs = [(run(llm, free, streams), run(llm, bound, streams)) for _ in range(options.rounds + 1)][1:]
        ratios = [theirs.seconds / ours.seconds for theirs, ours in runs]
        rates = [streams * options.tokens / min(one.seconds for one in column) for column in zip(*runs, strict=True)]
        cpu = [1e3 * statistics.median(one.cpu_seconds for one in column) for column in zip(*runs, strict=True)]
        print(
            f"| {streams} | {rates[0]:.0f} | {rates[1]:.0f} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to "
            f"{max(ratios):.3f} | {cpu[0] / streams / options.tokens:.3f} | {cpu[1] / streams / options.tokens:.3f} |",
            flush=True,
        )
    report_new_schemas(llm, free)
    report_forced_tokens(llm, bound)


class Run(NamedTuple):
    """What the outputs of one run took."""

    seconds: float
    cpu_seconds: float  # of all threads


def run(llm: LLM, params: SamplingParams, streams: int) -> Run:
    """Generate `streams` outputs that run together."""
    prompts = [f"List number {at} of people with pets, as JSON:" for at in range(streams)]
    began, cpu_began = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = Run(time.perf_counter() - began, time.process_time() - cpu_began)
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert count == streams * (params.max_tokens or 0), "all outputs have the same length"
    return result


def report_new_schemas(llm: LLM, free: SamplingParams, rounds: int = 20) -> None:
    """Print how much later the first token of an output comes if its schema was never seen."""
    free = replace(free, max_tokens=1)
    later = []
    for at in range(rounds):
        demand = StructuredOutputsParams(json=SCHEMA | {"title": str(at)})
        later.append(run(llm, replace(free, structured_outputs=demand), 1).seconds - run(llm, free, 1).seconds)
    compiler = GrammarCompiler(llm.tokenizer)
    seconds = [compile_seconds(compiler, SCHEMA | {"title": str(at)}) for at in range(rounds)]
    print(
        f"\nThe first token by a new schema comes {1e3 * statistics.median(later):.2f} ms later. To compile it, which "
        f"is done twice, takes {1e3 * statistics.median(seconds):.2f} ms."
    )


def report_forced_tokens(llm: LLM, params: SamplingParams, streams: int = 8) -> None:
    """Print the share of tokens beside which the grammar allows no other, and of those that follow one of them.

    With two steps in flight, the first one of several is being computed when it is known, so only the others could be
    taken without a forward pass.
    """
    assert params.structured_outputs is not None
    compiler = GrammarCompiler(llm.tokenizer)
    grammar = grammar_text(params.structured_outputs)
    words = np.empty((1, compiler.mask_words), np.int32)
    forced = following = total = 0
    prompts = [f"List number {at} of people with pets, as JSON:" for at in range(streams)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        matcher, was_forced = compiler.matcher(grammar), False
        for token in output.outputs[0].token_ids:
            fill_next_token_bitmask(matcher, words)
            is_forced = int(np.bitwise_count(words.view(np.uint32)).sum()) == 1
            forced, following, total = forced + is_forced, following + (is_forced and was_forced), total + 1
            was_forced = is_forced
            matcher.consume_token(token)
    print(f"{forced / total:.1%} of the tokens are forced, {following / total:.1%} behind another one that is.")


def compile_seconds(compiler: GrammarCompiler, schema: dict[str, Any]) -> float:
    grammar = grammar_text(StructuredOutputsParams(json=schema))
    began = time.perf_counter()
    compiler.check(grammar, "json")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
