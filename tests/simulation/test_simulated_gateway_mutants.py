"""Tests that the simulation of a gateway finds bugs: each mutant is the real code with one, and all must be found."""

import gateway_workloads
import pytest
from mutants import mutated

ENOUGH = 400
"""Workloads in which a mutant must be found; most are within the first twenty."""

REQUEST = "gateway.engine_request:EngineRequest"
CONNECTION = "gateway.engine_connection:EngineConnection"
BACKEND = "gateway.backend:Backend"
SAMPLE = "gateway.engine_request:_Sample"
QUARANTINE = "scheduler.core.quarantine:Quarantine"
OUTPUT = "self._tokens + self._samples[first].output"

MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "a resubmission loses the last token": [(f"{REQUEST}._submit", OUTPUT, f"{OUTPUT}[:-1]")],
    "a resubmission loses the first token": [(f"{REQUEST}._submit", OUTPUT, f"{OUTPUT}[1:]")],
    "a resubmission loses the output": [(f"{REQUEST}._submit", OUTPUT, "self._tokens")],
    "a resubmission doubles a token": [
        (f"{REQUEST}._submit", OUTPUT, f"{OUTPUT} + self._samples[first].output[-1:]"),
    ],
    "a resubmission forgets prompt_len": [
        (f"{REQUEST}._submit", "prompt_len=len(self._tokens)", f"prompt_len=len({OUTPUT})"),
    ],
    "a resubmission reuses an attempt's id": [
        (f"{REQUEST}.place", "next(ids)", "(self._attempts[0].id if self._attempts else next(ids))"),
    ],
    "a connection has the same id for all": [(f"{CONNECTION}.place", "self._ids", "itertools.count()")],
    "a resubmission has the noise of another sample": [(f"{REQUEST}._submit", "sample=first", "sample=0")],
    "a resubmission has another seed": [
        (f"{REQUEST}._submit", "else replace(self._sampling, ", "else replace(self._sampling, seed=id, "),
    ],
    "a resubmission forgets the other samples": [
        (f"{REQUEST}._submit", "sample=first,", "sample=first, n=1,"),
        (f"{REQUEST}._submit", "n=len(samples),", ""),
    ],
    "an abort is forgotten": [(f"{REQUEST}.abort", "attempt.engine.abort(attempt.id, sample)", "pass")],
    "an aborted sample goes on": [(f"{REQUEST}.abort", "del self._samples[sample]", "pass")],
    "what a client leaves is not aborted": [(f"{CONNECTION}.release", "self.abort(attempt.id)", "pass")],
    "a finished sample is submitted again": [(f"{REQUEST}.add", "del self._samples[row.sample]", "pass")],
    "samples with output are submitted together": [
        (f"{REQUEST}.place", "len(unplaced) == self._n and not self.has_output", "len(unplaced) == self._n"),
    ],
    "a sample is submitted where it runs": [(f"{REQUEST}.unplaced", "if sample not in placed", "")],
    "prompt log-probabilities are sent again": [
        (f"{REQUEST}._without_known_logprobs", "min(self._skip_prompt_logprobs, len(row.prompt_logprobs))", "0"),
    ],
    "prompt log-probabilities are left out": [
        (f"{REQUEST}._without_known_logprobs", "self._skip_prompt_logprobs -= known", "pass"),
    ],
    "a prompt is scored again": [
        (f"{REQUEST}._submit", "first == 0 and self._num_prompt_logprobs < len(self._tokens) - 1", "first == 0"),
    ],
    "usage changes": [(f"{REQUEST}._continued", "row = replace(row, cached_tokens=sample.cached_tokens)", "pass")],
    "preemptions are forgotten": [
        ("gateway.engine_request:_Sample.note_scheduling", "self.preemptions_before + ", ""),
    ],
    "suspicions are forgotten": [(f"{SAMPLE}.note_scheduling", "self.suspicion = scheduling.suspicion", "pass")],
    "a resubmission forgets its suspicion": [
        (f"{REQUEST}._submit", "suspicion=max(", "suspicion=Suspicion() or max("),
    ],
    "deaths are forgotten when a sample moves": [
        (
            f"{SAMPLE}.begin_attempt",
            "self.preemptions_before =",
            "self.suspicion = Suspicion(self.suspicion.cleared_at); self.preemptions_before =",
        ),
    ],
    "deaths are counted twice when a sample moves": [
        (
            f"{SAMPLE}.begin_attempt",
            "self.preemptions_before =",
            "self.suspicion = replace(self.suspicion, deaths_alone=2 * self.suspicion.deaths_alone); "
            "self.preemptions_before =",
        ),
    ],
    "a suspect stays one for its gateway": [
        (
            f"{SAMPLE}.note_scheduling",
            "self.suspicion = scheduling.suspicion",
            "self.suspicion = max(self.suspicion, scheduling.suspicion, key=_weight)",
        ),
    ],
    "an engine forgets the deaths that a suspect brings": [
        (f"{QUARANTINE}.add_resubmitted", "min(suspicion.deaths_alone, MAX_DEATHS_ALONE - 1)", "0"),
    ],
    "an engine counts them twice": [
        (
            f"{QUARANTINE}.add_resubmitted",
            "min(suspicion.deaths_alone, MAX_DEATHS_ALONE - 1)",
            "min(2 * suspicion.deaths_alone, MAX_DEATHS_ALONE - 1)",
        ),
    ],
    "a suspect from another engine is welcome in company": [
        (f"{QUARANTINE}.add_resubmitted", "self._groups.append", "list")
    ],
    "an engine believes no suspicion": [(f"{QUARANTINE}.add_resubmitted", "not suspicion.deaths_alone", "True")],
    "an engine runs each former suspect alone": [
        (f"{QUARANTINE}.add_resubmitted", "not suspicion.deaths_alone or ", "not suspicion.cleared_at or "),
    ],
    "a suspicion wakes readers": [(f"{REQUEST}.add", "or reason):", "or reason or True):")],
    "the queue's seconds change": [
        (
            "gateway.engine_request:_Sample.note_scheduling",
            "self.scheduling.queued_seconds if self.scheduling else self.waited + scheduling.queued_seconds",
            "self.waited + scheduling.queued_seconds",
        ),
    ],
    "a resubmission is refused for load": [(f"{REQUEST}._submit", "resumed=self.accepted", "resumed=False")],
    "an engine refuses a resubmission for load": [
        ("scheduler.core.admission:accept", "submit.resumed or len(tokens) > submit.prompt_len", "False"),
    ],
    "an engine's end ends a sample": [(f"{REQUEST}.add", "reason is FinishReason.ABORT", "False")],
    "a loss takes attempts at other engines": [(f"{REQUEST}.leave", "attempt.engine is not engine", "False")],
    "a loss takes none": [(f"{REQUEST}.leave", "attempt.engine is not engine", "True")],
    "a refused request is forgotten": [(f"{CONNECTION}._handle_refusal", "request.reject(self, refused.id)", "pass")],
    "rows do not reach the reader": [(f"{CONNECTION}._read", "request.deliver()", "pass")],
    "a lost connection keeps its requests": [(f"{CONNECTION}._take_requests", "self._requests = {}", "pass")],
    "a new connection counts its ids again": [
        (f"{CONNECTION}._take_requests", "self._requests = {}", "self._requests = {}; self._ids = itertools.count()"),
    ],
    "requests that wait are forgotten": [
        (
            f"{BACKEND}._place_waiting",
            "if not self.ready():",
            "if not self.ready() and not self._waiting.clear():",
        ),
    ],
    "nobody hears that an engine is ready": [(f"{CONNECTION}._handle", "self._on_status(self)", "pass")],
    "an accepted request goes where it does not fit": [
        (f"{BACKEND}._candidates", "request.max_length if request.accepted else ", ""),
    ],
    "a request goes where it does not fit": [
        (f"{BACKEND}._candidates", "length <= welcome.max_model_len", "True"),
    ],
    "a request forgets its salt": [(f"{REQUEST}._submit", "cache_salt=self.cache_salt", "cache_salt=''")],
    "a resubmission forgets its salt": [
        (f"{REQUEST}._submit", "cache_salt=self.cache_salt", "cache_salt='' if self.accepted else self.cache_salt"),
    ],
    "a reset waits for an engine that is gone": [
        (f"{CONNECTION}._run_connection", "reset.set_exception(Unavailable(reason))", "pass"),
    ],
    "a reset does not wait for its answer": [(f"{CONNECTION}.reset_prefix_cache", "await reset", "pass")],
    "a reset is not confirmed": [("scheduler.gateways:Gateways.confirm", "reset.gateway.outbox.append", "repr")],
    "a reset leaves out engines": [
        (f"{BACKEND}.reset_prefix_cache", "in self._connections", "in self._connections[:1]"),
    ],
    "a request waits on after its client left": [(f"{BACKEND}.end", "self._waiting.pop(request, None)", "pass")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_simulation_finds_the_mutant(name: str) -> None:
    with mutated("services", MUTANTS[name]):
        assert any(_fails(seed) for seed in range(ENOUGH)), f"not found: {name}"


def _fails(seed: int) -> bool:
    try:
        gateway_workloads.run(seed)
    except Exception:
        return True
    return False
