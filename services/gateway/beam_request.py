"""`BeamRequest`: a beam search at an engine. It has the interface of an `EngineRequest` whose rows all come at the end.

Each of its branches is an `EngineRequest` of one sample. They go to one engine as long as it lives, and survive it as
other requests do. They take the first one's place in the queue, and only that one can be refused for load.
"""

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.gateway.backend import Backend, EngineRequest
from services.gateway.engine_request import Interruption
from services.gateway.prompt import PreparedPrompt
from shared.beam_branches import BeamBranches, Branch
from shared.beam_params import BeamSettings
from shared.protocol import FinishReason, ProgressRow, SchedulingInfo, TokenLogprobs


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
        """Search, and return a row for each beam of the result, or the last row of a branch that has failed.

        Raise as that of an `EngineRequest` does.
        """
        while self._branches.branches:
            for branch in self._branches.branches:
                while not branch.has_step:
                    for row in await self._receive(branch):
                        if row.finish_reason is FinishReason.ERROR:
                            return [row]
            self._advance()
        return self._results()

    def abort(self, sample: int) -> None:
        """Do nothing: when a beam is known, it has ended."""

    def close(self) -> None:
        """Abort what still runs."""
        for branch in list(self._requests):
            self._end(branch)

    async def _receive(self, branch: Branch) -> Sequence[ProgressRow]:
        """Wait for rows of a branch, and keep what is in them."""
        request = self._last = self._requests[branch]
        rows = await request.rows()
        for row in rows:
            if row.finish_reason is not FinishReason.ERROR:
                branch.add(row)
            if request is self._first:
                self._prompt_logprobs += row.prompt_logprobs or ()
                self._cached_tokens = row.cached_tokens
                self._scheduling = row.scheduling or self._scheduling
        self.recoveries += request.recoveries
        request.recoveries.clear()
        return rows

    def _advance(self) -> None:
        changes = self._branches.advance()
        for branch, origin in changes.started:
            self._begin(branch, self._requests[origin])
        for branch in changes.dropped:
            self._end(branch)

    def _begin(self, branch: Branch, after: EngineRequest | None = None) -> EngineRequest:
        prompt = self._prompt
        request = self._requests[branch] = self._backend.begin(
            prompt.tokens,
            self._branches.sampling(branch),
            priority=prompt.priority,
            samples_before=prompt.samples_before + self._branches.branches.index(branch),
            request_id=prompt.request_id,
            output=array("i", branch.beam.tokens),
            after=after,
        )
        return request

    def _end(self, branch: Branch) -> None:
        request = self._requests.pop(branch)
        self._interruptions += request.interruptions
        self._backend.end(request)

    def _results(self) -> list[ProgressRow]:
        """Return the best beams, as many as are wanted, as the samples 0, 1, ..."""
        wanted = self._branches.search.finished[: self._prompt.params.n]
        return [
            ProgressRow(
                id=0,
                sample=sample,
                position=0,
                tokens=finished.beam.tokens,
                logprobs=finished.beam.all_logprobs,
                prompt_logprobs=self._prompt_logprobs if sample == 0 else None,
                finish_reason=finished.finish_reason,
                cached_tokens=self._cached_tokens,
                scheduling=self._scheduling,
            )
            for sample, finished in enumerate(wanted)
        ]


@asynccontextmanager
async def search(backend: Backend, prompt: PreparedPrompt, settings: BeamSettings) -> AsyncIterator[BeamRequest]:
    """Run a beam search for the time of the block. Raise as `Backend.begin` does."""
    request = BeamRequest(backend, prompt, settings)
    try:
        yield request
    finally:
        request.close()
