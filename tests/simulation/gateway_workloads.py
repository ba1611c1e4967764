"""Random workloads of a gateway whose engines die, drain and go away. One seed determines everything."""

import asyncio
from collections import Counter
from random import Random

from msgspec.structs import replace
from simulated_gateway import Clock, GatewayClient, SimulatedConnection, SimulatedScheduler, simulated
from simulated_sockets import Network
from simulated_worker import VOCABULARY
from workloads import random_limits

from services.gateway.backend import Backend
from services.gateway.engine_request import MAX_LOSSES, EngineRequest
from services.scheduler.core import Limits
from shared.errors import Unavailable
from shared.protocol import FinishReason, ProgressRow, Sampling, Submit

FAULTS = ["scheduler died", "all died", "worker died", "both died", "drained", "ended", "cut", "given up", "late"]


def run(seed: int) -> Counter[str]:
    """Run one workload. Raise AssertionError if a request gets other output than alone. Return what has happened."""
    rng, network, clock = Random(seed), Network(), Clock()
    limits = replace(random_limits(rng), max_queued_requests=rng.choice([1, 4, 1000, 1000]))
    addresses = [f"tcp://engine:{port}" for port in range(1, 1 + rng.choice([1, 2, 3]))]
    shorter = replace(limits, max_model_len=limits.max_model_len - rng.choice([0, 0, limits.max_model_len // 2]))
    engines = {address: rng.choice([limits, shorter]) for address in addresses[1:]} | {addresses[0]: limits}
    with simulated(network, clock):
        return asyncio.run(_run(rng, network, clock, engines, Random(f"cache of {seed}")))


async def _run(
    rng: Random, network: Network, clock: Clock, engines: dict[str, Limits], cache_rng: Random
) -> Counter[str]:
    """`engines` are the limits of each engine, by address. Some may have a shorter context than others."""
    poison: dict[int, int] = {}
    schedulers = [
        SimulatedScheduler(address, limits, network, clock, rng, poison) for address, limits in engines.items()
    ]
    async with Backend(list(engines)) as backend, asyncio.TaskGroup() as clients:
        script = _Script(rng, clock, schedulers, backend, clients, cache_rng)
        for _ in range(rng.randint(20, 200)):
            script.move()
            await let_others_run(rng.randint(0, 3))
        await script.finish()
        script.check_finished()
        return script.seen


async def let_others_run(turns: int) -> None:
    """Give way to the other tasks for some turns of the event loop."""
    for _ in range(turns):
        await asyncio.sleep(0)


class _Script:
    """The random events of a workload."""

    def __init__(
        self,
        rng: Random,
        clock: Clock,
        schedulers: list[SimulatedScheduler],
        backend: Backend,
        tasks: asyncio.TaskGroup,
        cache_rng: Random,
    ) -> None:
        """`cache_rng` decides about salts and resets of the prefix cache, so that the rest stays as it is."""
        self.cache_rng = cache_rng
        self.salts = cache_rng.choice([[""], ["", "1", "2"]])
        self.resets: list[asyncio.Task[None]] = []
        self.reset_share = cache_rng.choice([0.0, 0.02])  # of events
        self.rng, self.clock, self.schedulers, self.backend, self.tasks = rng, clock, schedulers, backend, tasks
        self.connections: list[SimulatedConnection] = backend._connections  # type: ignore[assignment]
        for connection in self.connections:
            connection.on_submit, connection.on_news = self._check_submit, self._note_news
        self.poison = schedulers[0].poison
        self.poisonous = rng.random() < 0.25
        self.clients: dict[GatewayClient, asyncio.Task[None]] = {}
        self.prefixes = [self._tokens(rng.randint(1, 24)) for _ in range(2)]
        self.seen: Counter[str] = Counter()
        self.faults = rng.choice([0.0, 0.03, 0.1])  # the share of events that are faults
        self.kinds = rng.sample(FAULTS, rng.randint(2, len(FAULTS)))
        self.draining = False  # whether a scheduler is to drain at the next opportunity
        self.clients_leave = rng.random() < 0.3
        self.giving_up = rng.random() < 0.3

    def move(self) -> None:
        """Let one thing happen."""
        rng = self.rng
        self.clock.now += rng.choice([0.0, 0.001, 0.01])
        if self.cache_rng.random() < self.reset_share:
            self.resets.append(self.tasks.create_task(self._reset_prefix_cache()))
        roll = rng.random()
        if self.draining:
            self._drain()
        if roll < self.faults:
            self._fault()
        elif roll < self.faults + 0.08:
            self._submit()
        elif roll < self.faults + 0.1 and self.clients_leave and self.clients:
            rng.choice(list(self.clients.values())).cancel()
        elif roll < 0.7:
            self._turn(rng.choice(self.schedulers))
        else:
            rng.choice(self.connections).read(rng.choice([1, 2, 64]), self.clock.now)

    async def finish(self) -> None:
        """Let everything work again, until all clients are served, within a bound on turns."""
        bound = 200 + 8 * sum(client.work for client in self.clients)
        patience = self.rng.randint(0, 20) if self.clients_leave else bound
        while not all(task.done() for task in (*self.clients.values(), *self.resets)):
            await self._work()
            bound -= 1
            patience -= 1
            if not patience:
                for task in self.clients.values():
                    task.cancel()
            assert bound >= 0, f"no end: {[client.request for client, task in self.clients.items() if not task.done()]}"
        for _ in range(5):  # the last aborts
            await self._work()

    def check_finished(self) -> None:
        """Check that each sample has ended as it should, and nothing is left of it."""
        backend = self.backend
        num_losses = self._num_losses()
        for client in self.clients:
            self.seen[client.outcome] += 1
            failed = [one for one in client.samples.values() if one.finish_reason is FinishReason.ERROR]
            guilty = client.seed in self.poison
            assert not failed or guilty or self.seen["worker died"] > 1, "an innocent request was condemned"
            self.seen["poison found"] += bool(failed) and guilty
            allowed = {
                "served",
                "refused",
                "too long",
                *["left"] * self.clients_leave,
                *["given up"] * self.seen["away for long"],
                *["lost too often"] * (num_losses >= MAX_LOSSES),
            }
            assert client.outcome in allowed
        for scheduler in self.schedulers:
            scheduler.check_finished()
            self.seen += scheduler.deaths
        assert not any(one._requests or one._resets for one in self.connections), "ids are forgotten"
        assert (backend._waiting, backend._fingerprints) == ({}, {})
        self.seen["resumed"] += int(backend.losses.resumed._value.get())

    async def _reset_prefix_cache(self) -> None:
        """Reset all engines' prefix caches, which succeeds if each of them lives until then."""
        num_resets, num_losses = self._num_resets(), self._num_losses()
        lost = any(one.welcome is None or one._lost.done() for one in self.connections)
        try:
            await self.backend.reset_prefix_cache()
        except Unavailable:
            assert lost or self._num_losses() > num_losses, "it fails only if an engine is lost"
            self.seen["not reset"] += 1
        else:
            done = [now > before for now, before in zip(self._num_resets(), num_resets, strict=True)]
            assert all(done), "every engine has done it"
            self.seen["reset"] += 1

    def _num_resets(self) -> list[int]:
        return [one.num_resets for one in self.schedulers]

    def _num_losses(self) -> int:
        return sum(one.num_losses for one in self.connections)

    def _fault(self) -> None:
        rng, scheduler, connection = self.rng, self.rng.choice(self.schedulers), self.rng.choice(self.connections)
        match rng.choice(self.kinds):
            case "scheduler died" if scheduler.up:
                self.seen["scheduler died"] += 1
                scheduler.die()
            case "all died" if all(one.up for one in self.schedulers) and rng.random() < 0.3:
                self.seen["all died"] += 1
                for one in self.schedulers:
                    one.die()
            case "worker died" if scheduler.ready:
                self.seen["worker died"] += 1
                scheduler.lose_worker()
            case "both died" if scheduler.ready:
                self.seen["worker died"] += 1
                scheduler.lose_worker()
                self._die_after_worker(scheduler)
            case "drained":
                self.draining = True
            case "ended" if scheduler.up:
                self._shut_down(scheduler)
            case "cut" if connection.link is not None:
                self.seen["cut"] += 1
                connection.lose("overdue")
            case "given up" if connection.link is not None and scheduler.ready:
                self.seen["gateway given up"] += 1
                connection.link.to_scheduler.append(b"garbage")
            case "late":  # statuses are out of date
                self.clock.now += 3
                if self.giving_up and not any(one.ready for one in self.schedulers):
                    self.seen["away for long"] += 1
                    self.clock.now += 60

    def _die_after_worker(self, scheduler: SimulatedScheduler) -> None:
        """Let a scheduler die that has lost its worker, as soon as it has told the gateway who was running."""
        self.seen["died after the worker"] += 1
        scheduler.turn(deliver=False, max_messages=0, plan=False)
        for connection in self.connections:
            connection.read(64, self.clock.now)
        scheduler.die()

    def _drain(self) -> None:
        """Let a scheduler drain that has read a part of what has come, maybe of a resubmission: the rest is refused."""
        for scheduler in self.schedulers:
            partly = scheduler.up and scheduler.reads_part()
            if partly or (scheduler.up and self.rng.random() < 0.01):
                self.seen["drained"] += 1
                self.seen["drained between two samples"] += partly
                self.draining = False
                scheduler.drain()
                scheduler.turn(deliver=False, max_messages=32, plan=False)
                return

    def _turn(self, scheduler: SimulatedScheduler) -> None:
        rng = self.rng
        if not scheduler.up and rng.random() < 0.3:
            scheduler.boot()
        if not scheduler.up:
            return
        if rng.random() < 0.3:
            scheduler.see_disconnects()
        if not scheduler.ready and rng.random() < 0.3:
            scheduler.start_worker()
        if rng.random() < 0.3:
            scheduler.tick()
        had_worker = scheduler.ready
        scheduler.turn(deliver=rng.random() < 0.8, max_messages=rng.choice([0, 1, 3, 32]), plan=rng.random() < 0.8)
        if had_worker and not scheduler.ready and "both died" in self.kinds and rng.random() < 0.3:
            self._die_after_worker(scheduler)
            return
        if scheduler.drained and rng.random() < 0.3:
            self._shut_down(scheduler)

    async def _work(self) -> None:
        """Let everything take a turn."""
        self.clock.now += 0.05
        for scheduler in self.schedulers:
            if scheduler.drained:
                self._shut_down(scheduler)
            if not scheduler.up:
                scheduler.boot()
            scheduler.see_disconnects()
            if not scheduler.ready:
                scheduler.start_worker()
            scheduler.tick()
            scheduler.turn(deliver=True, max_messages=32, plan=True)
        for connection in self.connections:
            connection.send_heartbeat()
            connection.read(64, self.clock.now)
        await let_others_run(4)

    def _shut_down(self, scheduler: SimulatedScheduler) -> None:
        self.seen["ended"] += 1
        scheduler.shut_down()

    def _check_submit(self, submit: Submit) -> None:
        client = next((one for one in self.clients if one.seed == submit.sampling.seed), None)
        if client is not None:  # otherwise its noise is wrong, which will show
            self.seen["at two engines"] += client.check_submit(submit) > 1
            self.seen["suspect resubmitted"] += submit.suspicion.cleared_at > 0
            self.seen["suspect with a death resubmitted"] += submit.suspicion.deaths_alone > 0

    def _note_news(self, request: EngineRequest, row: ProgressRow) -> None:
        client = next((one for one in self.clients if one.request is request), None)
        if client is not None and row.scheduling is not None:
            client.suspicions[row.sample] = row.scheduling.suspicion

    def _submit(self) -> None:
        rng, longest = self.rng, max(scheduler.limits.max_model_len for scheduler in self.schedulers)
        prompt = rng.choice(self.prefixes)[: rng.choice([4, 8, 12, 24])]
        prompt = (prompt + self._tokens(rng.choice([0, 0, 1, 3, 8])))[:longest]
        max_tokens = min(rng.choice([0, 1, 2, 5, 9, 20]), longest - len(prompt))
        sampling = Sampling(
            max_tokens=max_tokens,
            seed=1000 + len(self.clients),
            stop_token_ids=self._tokens(1) if rng.random() < 0.3 else [],
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
            prompt_logprobs=rng.choice([-1, -1, 0]),
        )
        n = rng.choice([1, 1, 1, 2, 3, 5])
        if self.poisonous and rng.random() < 0.3:
            self.poison[sampling.seed] = rng.randint(0, len(prompt) + max_tokens)
        client = GatewayClient(
            prompt,
            sampling,
            n=n,
            stops={sample: rng.randint(1, 4) for sample in range(n) if rng.random() < 0.2},
            waits=rng.random() < 0.5,
            salt=self.cache_rng.choice(self.salts),
            priority=rng.randint(-2, 2) if self.schedulers[0].limits.policy == "priority" else 0,
            samples_before=rng.choice([0, 0, 0, 1, 7]),
        )
        self.clients[client] = self.tasks.create_task(client.run(self.backend))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]
