"""Measures what a beam search costs, beside as many samples of the same lengths, in turns, in process.

    python -m benchmarks.beam_search [--widths 1 4 8] [--rounds 3] [--tokens 64] [--prompt 128] [--lookahead 1 2 4 8]

For each width it prints the seconds of one search, those of greedy samples in equal number, their ratio, and the
positions that the engine computed for each token of a beam: 1 would be without any waste. `--lookahead` varies how far
a branch runs ahead (`shared.beam_branches.LOOKAHEAD`).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire import LLM, BeamSearchParams, SamplingParams
from shared import beam_branches


class Run(NamedTuple):
    """A search, or the samples beside it."""

    seconds: float
    computed: int  # positions, those of the prompt included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--lookahead", type=int, nargs="+", default=[beam_branches.LOOKAHEAD])
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    llm, rng = LLM(options.model), random.Random(0)
    print("| beams | lookahead | search, s | samples, s | ratio | positions a token |\n|---|---|---|---|---|---|")
    for width in options.widths:
        for lookahead in options.lookahead:
            beam_branches.LOOKAHEAD = lookahead
            rounds = [both(llm, rng, width, options) for _ in range(options.rounds + 1)][1:]
            searches, samples = zip(*rounds, strict=True)
            ratio = statistics.median(ours.seconds / theirs.seconds for ours, theirs in rounds)
            extra = statistics.median(ours.computed - options.prompt for ours in searches)
            print(
                f"| {width} | {lookahead} | {fastest(searches):.2f} | {fastest(samples):.2f} | {ratio:.2f} "
                f"| {extra / (width * options.tokens):.1f} |",
                flush=True,
            )


def both(llm: LLM, rng: random.Random, width: int, options: argparse.Namespace) -> tuple[Run, Run]:
    """Return a search and as many samples, each with a prompt that no cache knows."""

    def prompt() -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(options.prompt)]

    beams = BeamSearchParams(width, options.tokens, ignore_eos=True)
    greedy = SamplingParams(n=width, temperature=0, max_tokens=options.tokens, ignore_eos=True)
    return (
        run(llm, lambda: llm.beam_search(prompt(), beams)),
        run(llm, lambda: llm.generate(prompt(), greedy, use_tqdm=False)),
    )


def run(llm: LLM, work: Callable[[], object]) -> Run:
    before, began = computed(llm), time.perf_counter()
    work()
    return Run(time.perf_counter() - began, computed(llm) - before)


def computed(llm: LLM) -> int:
    return llm._running().engine.snapshot.step_tokens_sum


def fastest(runs: Sequence[Run]) -> float:
    return min(run.seconds for run in runs)


if __name__ == "__main__":
    main()
