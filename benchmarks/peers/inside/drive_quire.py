"""Quire's engine, in process: `drive_quire.py SETTINGS-AS-JSON`, the settings being `quire.LLM`'s."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from closed_loop import Run, closed_loop, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from quire.engine import InProcessEngine
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import resolve
from shared.params import SamplingParams
from shared.protocol import Submit, pack_tokens


class Engine:
    """The engine, with greedy requests."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.engine = InProcessEngine(resolve(SchedulerConfig, settings, {}), resolve(WorkerConfig, settings, {}))

    def add(self, id: int, tokens: list[int], output: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        sampling = params.to_sampling(
            prompt_len=len(tokens),
            max_model_len=self.engine.limits.max_model_len,
            vocab_size=self.engine.model.vocab_size,
            eos_token_ids=(),
        )
        self.engine.submit(Submit(id=id, tokens=pack_tokens(tokens), prompt_len=len(tokens), sampling=sampling))

    def step(self) -> Iterator[tuple[int, int]]:
        for row in self.engine.step():
            yield row.id, len(row.tokens)


def load() -> Run:
    return closed_loop(Engine(json.loads(sys.argv[1])))


if __name__ == "__main__":
    serve(load)
