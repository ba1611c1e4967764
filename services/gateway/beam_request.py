"""`BeamRequest`: a beam search at an engine. It has the interface of an `EngineRequest` whose rows come at the end.

Each of its branches is an `EngineRequest` of one sample. They go to one engine as long as it lives, and survive it as
other requests do. They take the first one's place in the queue, and only that one can be refused for load.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from services.gateway.backend import Backend, EngineRequest
from services.gateway.engine_request import Interruption
from services.gateway.prompt import PreparedPrompt
from shared.beam_branches import BeamBranches, Branch
from shared.beam_params import BeamSettings
from shared.protocol import FinishReason, ProgressRow, SchedulingInfo, TokenLogprobs

PIECE = 128
"""Tokens of a result that become text in one turn of the event loop: with twenty alternatives each, some 15 ms."""


class BeamRequest:
    """The search for one prompt. One task reads it: `rows` runs the search."""

    def __init__(self, backend: Backend, prompt: PreparedPrompt, settings: BeamSettings) -> None:
        """Submit the first branch. Raise as `Backend.begin` does."""
        self.recoveries: list[Interruption] = []  # that have ended; the reader takes them out
        self._backend = backend
        self._prompt = prompt
        self._branches = BeamBranches(settings, prompt.sampling)
        self._requests: dict[Branch, EngineRequest] = {}
        self._interruptions: list[Interruption] = []  # of branches that have ended
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._cached_tokens = 0
        self._scheduling: SchedulingInfo | None = None  # of the first branch
        self._results: Iterator[ProgressRow] | None = None  # once the search has ended
        self._first = self._last = self._begin(self._branches.branches[0])  # the last one that had rows

    @property
    def engine(self) -> str:
        return self._last.engine

    @property
    def interruptions(self) -> list[Interruption]:
        return self._interruptions + [one for request in self._requests.values() for one in request.interruptions]

    async def wait_accepted(self) -> None:
        """Wait, and raise, as that of an `EngineRequest` does."""
        await self._first.wait_accepted()

    async def rows(self) -> list[ProgressRow]:
        """Search, and return the result in pieces, one at each call: beam after beam, as the samples 0, 1, ...

        Return the last row of a branch that has failed, and raise, as that of an `EngineRequest` does.
        """
        if self._results is None:
            if (failure := await self._search()) is not None:
                return [failure]
            self._results = self._pieces()
        await asyncio.sleep(0)  # making text of a piece takes milliseconds
        return [next(self._results)]

    async def follow(self, take: Callable[[list[ProgressRow]], bool]) -> None:
        """Pass rows to `take`, until it returns false."""
        while take(await self.rows()):
            pass

    def abort(self, sample: int) -> None:
        """Do nothing: when a beam is known, it has ended."""

    def close(self) -> None:
        """Abort what still runs."""
        for branch in list(self._requests):
            self._end(branch)

    async def _search(self) -> ProgressRow | None:
        """Run the search. Return the last row of a branch that has failed, if one has."""
        while self._branches.branches:
            for branch in self._branches.branches:
                while not branch.has_step:
                    if (failure := await self._receive(branch)) is not None:
                        return failure
            changes = self._branches.advance()
            for branch, origin in changes.started:
                self._begin(branch, self._requests[origin])
            for branch in changes.dropped:
                self._end(branch)
        return None

    async def _receive(self, branch: Branch) -> ProgressRow | None:
        """Wait for rows of a branch, and keep what is in them. Return the row that says that it has failed."""
        request = self._requests[branch]
        rows = await request.rows()
        self._last = request
        for row in rows:
            if row.finish_reason is FinishReason.ERROR:
                return row
            branch.add(row)
            if request is self._first:
                self._prompt_logprobs += row.prompt_logprobs or ()
                self._cached_tokens = row.cached_tokens
                self._scheduling = row.scheduling or self._scheduling
        self.recoveries += request.recoveries
        request.recoveries.clear()
        return None

    def _begin(self, branch: Branch, after: EngineRequest | None = None) -> EngineRequest:
        """Submit a branch; `after` is the request of the one that it comes from."""
        prompt, output = self._prompt, array("i")
        if after is not None:  # whose array is at hand, while a beam would have to collect its tokens
            output = after.outputs[0][: branch.beam.length - 1] + array("i", [branch.beam.token])
        request = self._requests[branch] = self._backend.begin(
            prompt.tokens,
            self._branches.sampling(branch),
            priority=prompt.priority,
            samples_before=prompt.samples_before + self._branches.branches.index(branch),
            request_id=prompt.request_id,
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
            output=output,
            after=after,
        )
        return request

    def _end(self, branch: Branch) -> None:
        request = self._requests.pop(branch)
        self._interruptions += request.interruptions
        self._backend.end(request)

    def _pieces(self) -> Iterator[ProgressRow]:
        """Yield the best beams, as many as are wanted, in rows of at most `PIECE` tokens."""
        for sample, finished in enumerate(self._branches.search.finished[: self._prompt.params.n]):
            tokens, logprobs = finished.beam.tokens, finished.beam.all_logprobs
            for start in range(0, len(tokens), PIECE):
                end = start + PIECE
                yield ProgressRow(
                    id=0,
                    sample=sample,
                    position=start,
                    tokens=tokens[start:end],
                    logprobs=None if logprobs is None else logprobs[start:end],
                    prompt_logprobs=None if sample or start else self._prompt_logprobs,
                    finish_reason=finished.finish_reason if end >= len(tokens) else None,
                    cached_tokens=self._cached_tokens,
                    scheduling=self._scheduling,
                )


@asynccontextmanager
async def search(backend: Backend, prompt: PreparedPrompt, settings: BeamSettings) -> AsyncIterator[BeamRequest]:
    """Run a beam search for the time of the block. Raise as `Backend.begin` does."""
    request = BeamRequest(backend, prompt, settings)
    try:
        yield request
    finally:
        request.close()
