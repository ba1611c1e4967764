"""Measures what a grammar costs: outputs that follow a JSON schema beside free ones of the same length, in turns.

    python -m benchmarks.structured [--streams 1 8 32] [--rounds 5] [--tokens 96] [--model FOLDER]

Prints tokens a second of both and their ratio in each round, and then the time that a grammar takes before its first
token: compiled once at the gateway and once at the worker.
"""

import argparse
import statistics
import time
from typing import Any

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
    print("| streams | free, tok/s | by schema, tok/s | ratio | ratios of the rounds |\n|---|---|---|---|---|")
    for streams in options.streams:
        rates = [(rate(llm, free, streams), rate(llm, bound, streams)) for _ in range(options.rounds + 1)][1:]
        ratios = [ours / theirs for theirs, ours in rates]
        fastest = (max(column) for column in zip(*rates, strict=True))
        print(
            f"| {streams} | {' | '.join(f'{value:.0f}' for value in fastest)} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} to {max(ratios):.3f} |"
        )
    compiler = GrammarCompiler(llm.tokenizer)
    seconds = [compile_seconds(compiler, RECORD | {"title": str(at)}) for at in range(20)]
    print(f"\nA new schema: {1e3 * statistics.median(seconds):.2f} ms to compile, of which there are two.")


def rate(llm: LLM, params: SamplingParams, streams: int) -> float:
    """Return tokens a second of `streams` outputs that run together."""
    prompts = [f"List number {at} of people with pets, as JSON:" for at in range(streams)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert count == streams * (params.max_tokens or 0), "all outputs have the same length"
    return count / seconds


def compile_seconds(compiler: GrammarCompiler, schema: dict[str, Any]) -> float:
    grammar = grammar_text(StructuredOutputsParams(json=schema))
    began = time.perf_counter()
    compiler.check(grammar, "json")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
