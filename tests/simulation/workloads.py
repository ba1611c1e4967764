"""Random workloads: one seed determines everything, so a failing one can be run again by its number."""

from random import Random

from simulated_engine import SimulatedEngine
from simulated_worker import VOCABULARY

from services.scheduler.core import Limits
from shared.protocol import FinishReason, Refused


def run(seed: int) -> SimulatedEngine:
    """Run one workload from beginning to end. Raise AssertionError if any promise is broken."""
    chance = Random(seed)
    engine = SimulatedEngine(_limits(chance))
    script = _Script(chance, engine)
    for _ in range(chance.randint(4, 40)):
        script.act()
    script.finish()
    engine.check_finished()
    script.judge()
    return engine


def _limits(chance: Random) -> Limits:
    size = chance.choice([1, 2, 3, 4, 4, 8])
    seqs = chance.randint(1, 6)
    longest = chance.randint(12, 48)
    blocks = -(-longest // size) + chance.choice([0, 0, 1, 2, 5, 20, 60])
    policy = chance.choice(["fcfs", "fcfs", "priority"])
    return Limits(
        block_size=size,
        num_blocks=blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + chance.choice([1, 2, 5, 16, 64]),
        max_model_len=longest,
        prefix_caching=chance.random() < 0.9,
        depth=chance.choice([1, 2, 2]),
        policy=policy,  # type: ignore[arg-type]
        priority_ageing=chance.choice([0.0, 0.05]) if policy == "priority" else 0.0,
        max_queued_requests=chance.choice([4, 1000]),
    )


class _Script:
    """The moves of a workload, and what they may lead to."""

    def __init__(self, chance: Random, engine: SimulatedEngine) -> None:
        self.chance = chance
        self.engine = engine
        self.prefixes = [self._tokens(chance.randint(1, 24)) for _ in range(2)]
        self.losses = 0
        self.aborts = chance.random() < 0.5
        self.deaths = chance.random() < 0.25
        self.poisonous = chance.random() < 0.1
        self.work = 0  # positions, were nothing shared or done twice
        self.poisoned: set[int] = set()

    def act(self) -> None:
        """Make one move."""
        chance, engine = self.chance, self.engine
        engine.now += chance.choice([0.0, 0.001, 0.01])
        roll = chance.random()
        if roll < 0.3:
            self._submit()
        elif roll < 0.36 and self.aborts and engine.clients:
            id, sample = chance.choice(list(engine.clients))
            engine.abort(id, chance.choice([-1, sample]))
        elif roll < 0.39 and self.deaths and engine.worker is not None and not self.poisonous:
            self.losses += 1
            engine.lose()
        elif roll < 0.45:
            engine.deliver_stale(chance)
        elif engine.worker is None:
            engine.begin()
        elif engine.results and roll < 0.7:
            engine.deliver()
        else:
            engine.plan()

    def finish(self) -> None:
        """Run to the end within a bound on steps."""
        engine = self.engine
        if engine.worker is None:
            engine.begin()
        if self.chance.random() < 0.2:
            engine.core.drain()
        # each step moves the first in order on by a position at min_tokens, and a preempted one is computed again
        engine.run(100 + 8 * self.work * (1 + len(self.poisoned)))

    def judge(self) -> None:
        """Check what must be true of the workload as a whole."""
        caching = self.engine.limits.prefix_caching  # a hit spares computing the deadly position
        for (id, _), client in self.engine.clients.items():
            if client.finish_reason is FinishReason.ERROR:  # killed twice while alone, by itself or by chance
                assert id in self.poisoned or self.losses > 1, "an innocent request was condemned"
            elif (
                id in self.poisoned and client.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not caching
            ):
                assert len(client.oracle.tokens) + client.prompt_len - 1 <= self.engine.poison[id], (
                    "it went past its death"
                )
        state = self.engine.core.snapshot()
        assert state.prefix_hits <= state.prefix_queries
        assert state.prompt_tokens <= sum(client.prompt_len for client in self.engine.clients.values())

    def _submit(self) -> None:
        chance, engine, longest = self.chance, self.engine, self.engine.limits.max_model_len
        prompt = chance.choice(self.prefixes)[: chance.choice([4, 8, 12, 24])]
        prompt = (prompt + self._tokens(chance.choice([0, 0, 1, 3, 8])))[:longest]
        max_tokens = min(chance.choice([0, 1, 2, 5, 9, 20]), longest - len(prompt))
        stops = self._tokens(1) if chance.random() < 0.3 else []
        min_tokens = chance.randint(0, max_tokens) if chance.random() < 0.2 else 0
        scores = chance.choice([-1, -1, -1, -1, 0])
        seed = engine._ids + 1
        output = self._output(prompt, max_tokens, stops, min_tokens, seed)
        n = 1 if output else chance.choice([1, 1, 1, 2, 3, 5])
        priority = chance.randint(-2, 2) if engine.limits.policy == "priority" else 0
        poisonous = self.poisonous and chance.random() < 0.3 and len(prompt) > 1
        if poisonous:
            engine.poison[seed] = chance.randint(1, len(prompt) + max_tokens)
            self.poisoned.add(seed)
        outcome = engine.submit(
            prompt,
            max_tokens,
            output=output,
            n=n,
            sample=chance.choice([0, 0, 3]),
            priority=priority,
            arrival=engine.now - chance.choice([0.0, 0.0, 0.02, 5.0]),
            samples_before=chance.choice([0, 0, 0, 1, 7]),
            stops=stops,
            min_tokens=min_tokens,
            prompt_logprobs=scores,
        )
        if isinstance(outcome, Refused):
            assert not output
        else:
            self.work += n * (len(prompt) + max_tokens + 1)

    def _output(self, prompt: list[int], max_tokens: int, stops: list[int], min_tokens: int, seed: int) -> list[int]:
        """Return output that the request brings, like one that is submitted again after a scheduler's death."""
        chance = self.chance
        if chance.random() > 0.15 or max_tokens < 2:
            return []
        output = [
            chance.choice([token for token in range(VOCABULARY) if token not in stops]) for _ in range(max_tokens)
        ]
        return output[: chance.randint(1, max_tokens - 1)]

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(VOCABULARY) for _ in range(count)]
