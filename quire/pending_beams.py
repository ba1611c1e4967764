"""`PendingBeams`: the beam search for one prompt of `LLM.beam_search`, on its way to a `BeamSearchOutput`."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from quire.engine import InProcessEngine
from quire.lora_request import LoRARequest
from quire.outputs import BeamSearchOutput, BeamSearchSequence, distribution
from quire.progress_bar import ProgressBar
from shared.beam_branches import BeamBranches, Branch
from shared.beam_params import BeamSearchParams
from shared.beam_search import FinishedBeam
from shared.errors import EngineFailure
from shared.protocol import FinishReason, Sampling, Submit, pack_tokens
from shared.text.logprobs import make_entry
from shared.text.tokenizer import Tokenizer


class PendingBeams:
    """A prompt, and the search for its continuations."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: BeamSearchParams,
        sampling: Sampling,
        *,
        cache_salt: str = "",
        adapter: LoRARequest | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self._cache_salt = cache_salt
        self._adapter = adapter
        self._params = params
        self._stop_ids = frozenset(sampling.stop_token_ids)
        settings = params.settings
        self.branches = BeamBranches(settings, replace(sampling, logprobs=settings.num_candidates(sampling)))

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens of the result, over all beams."""
        return sum(finished.beam.length for finished in self.branches.search.finished)

    def submit(self, id: int, branch: Branch) -> Submit:
        """Return a branch as a message to the engine."""
        return Submit(
            id=id,
            tokens=pack_tokens(self.prompt + branch.beam.tokens),
            prompt_len=len(self.prompt),
            sampling=self.branches.sampling(branch),
            request_id=str(id),
            cache_salt=self._cache_salt,
            adapter="" if self._adapter is None else self._adapter.lora_name,
        )

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """Return the result of the search, which has ended."""
        return BeamSearchOutput([self._sequence(finished, tokenizer) for finished in self.branches.search.finished])

    def _sequence(self, finished: FinishedBeam, tokenizer: Tokenizer) -> BeamSearchSequence:
        output, stopped = finished.beam.tokens, finished.finish_reason is FinishReason.STOP
        shown = output[:-1] if stopped and not self._params.include_stop_str_in_output else output
        return BeamSearchSequence(
            tokens=self.prompt + output,
            logprobs=[
                distribution(make_entry(tokenizer, token, logprobs, 0)) or {}
                for token, logprobs in zip(output, finished.beam.all_logprobs or (), strict=True)
            ],
            cum_logprob=finished.beam.cum_logprob,
            text=tokenizer.decode(self.prompt + shown, skip_special_tokens=self._params.skip_special_tokens),
            finish_reason=finished.finish_reason.value,
            stop_reason=output[-1] if stopped else None,
        )


def run_beams(engine: InProcessEngine, searches: Sequence[PendingBeams], ids: Iterator[int], bar: ProgressBar) -> None:
    """Run the searches until all have ended. After any exception, the engine is empty and usable."""
    running = _RunningBranches(engine, ids)
    try:
        for pending in searches:
            running.begin(pending, pending.branches.branches[0])
        while open_searches := [pending for pending in searches if pending.branches.branches]:
            running.step()
            for pending in open_searches:
                running.advance(pending)
                if not pending.branches.branches:
                    bar.count_finished(len(pending.prompt), pending.num_output_tokens)
    except BaseException:
        engine.reset(list(running.by_id))
        raise


class _RunningBranches:
    """The branches of all searches that are at the engine."""

    def __init__(self, engine: InProcessEngine, ids: Iterator[int]) -> None:
        self.by_id: dict[int, Branch] = {}
        self._ids: dict[Branch, int] = {}
        self._engine = engine
        self._next_ids = ids

    def begin(self, pending: PendingBeams, branch: Branch) -> None:
        id = self._ids[branch] = next(self._next_ids)
        self.by_id[id] = branch
        self._engine.submit(pending.submit(id, branch))

    def step(self) -> None:
        """Compute one step of the engine, and give its rows to their branches. Raise `EngineFailure` if one failed."""
        for row in self._engine.step():
            if (branch := self.by_id.get(row.id)) is not None:  # otherwise it was dropped in the meantime
                if row.finish_reason is FinishReason.ERROR:
                    raise EngineFailure(row.detail)
                branch.add(row)
                if branch.ended:
                    del self.by_id[row.id]

    def advance(self, pending: PendingBeams) -> None:
        """Take as many steps of a search as its branches have come to."""
        while pending.branches.branches and all(branch.has_step for branch in pending.branches.branches):
            changes = pending.branches.advance()
            for branch, _ in changes.started:
                self.begin(pending, branch)
            for branch in changes.dropped:
                id = self._ids.pop(branch)
                if self.by_id.pop(id, None) is not None:
                    self._engine.abort(id)
