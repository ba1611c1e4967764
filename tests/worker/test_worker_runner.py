"""Tests the runner on a tiny model: tokens, log-probabilities, and its worker info."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.cpu import extension
from services.worker.config import WorkerConfig
from services.worker.runner import ModelRunner
from services.worker.start import start_runner
from shared.errors import ModelError
from shared.protocol import Epoch, Fork, Row, StepPlan, TableWrite, decode_from_worker, encode
from tests.models.tiny_models import llama, reference_logits, save
from tests.worker.runner_client import RunnerClient, sequence

PROMPT = [5, 9, 100, 3, 77, 12, 8, 8, 41, 90]
SEEDED = {"temperature": 1.0, "seed": 77}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def runner(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = save(model, tmp_path_factory.mktemp("model"))
    return start_runner(
        WorkerConfig(model=str(folder), device="cpu", num_threads=1, kv_cache_memory=0.01, swap_space=0.02)
    )


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_info(runner: ModelRunner) -> None:
    info = runner.info
    assert info.model.architecture == "LlamaForCausalLM"
    assert info.model.dtype == "float32"
    assert (info.model.max_positions, info.model.vocab_size) == (128, 131)
    dim = 16 if extension.load() else 10  # compiled kernels round heads up
    assert info.kv_bytes_per_token == 3 * 2 * 2 * dim * 4
    assert info.kv_memory == int(0.01 * 2**30)
    assert info.device == "cpu"
    assert info.step_seconds > 0
    assert info.token_seconds > 0
    assert info.host_kv_memory == int(0.02 * 2**30)
    assert info.swap_bytes_per_second > 1e6
    assert len(info.model.fingerprint) == len(info.model.weights_digest) == len(info.model.text_digest) == 16


def test_greedy_as_transformers(runner: ModelRunner, model: PreTrainedModel) -> None:
    client = RunnerClient(runner)
    expected = greedy(model, PROMPT, 20)
    first = client.run((3, 0, 10, 1), new=[sequence(3, PROMPT, [9, 2, 30, 7, 8, 1, 40, 41])])
    assert first[3].tokens + client.decode(3, 11, 19) == expected
    assert first[3].logprobs is None
    assert first[3].prompt_logprobs is None


def test_chunks_of_prompts_beside_decodes(runner: ModelRunner, model: PreTrainedModel) -> None:
    client = RunnerClient(runner)
    other = PROMPT[::-1]
    got: dict[int, list[int]] = {0: [], 1: []}
    rows = client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(8))])
    got[0] += rows[0].tokens
    rows = client.run((0, 10, 1, 1), (1, 0, 4, 0), new=[sequence(1, other, range(20, 28))])
    assert sorted(rows) == [0]
    got[0] += rows[0].tokens
    rows = client.run((1, 4, 6, 1), (0, 11, 1, 1))
    for step in range(5):
        for slot in got:
            got[slot] += rows[slot].tokens
        rows = client.run((0, 12 + step, 1, 1), (1, 10 + step, 1, 1))
    assert got[0] == greedy(model, PROMPT, 7)
    assert got[1] == greedy(model, other, 5)


def test_table_writes_reach_the_forward_pass(runner: ModelRunner, model: PreTrainedModel) -> None:
    client = RunnerClient(runner)
    got = client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, [9, 4, 11])])[0].tokens
    got += client.run((0, 10, 1, 1))[0].tokens + client.run((0, 11, 1, 1))[0].tokens
    got += client.run((0, 12, 1, 1), writes=[TableWrite(0, 3, [33, 34])])[0].tokens
    got += client.decode(0, 14, 6)
    assert got == greedy(model, PROMPT, 10)


def test_a_slot_is_used_again(runner: ModelRunner, model: PreTrainedModel) -> None:
    client = RunnerClient(runner, slots=1)
    client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(3), logprobs=3, temperature=1.0)])
    short = PROMPT[3:6]
    rows = client.run((0, 0, 3, 1), released=[0], new=[sequence(0, short, [2, 5, 0, 1])])
    assert rows[0].logprobs is None
    assert rows[0].tokens + client.decode(0, 4, 4) == greedy(model, short, 5)


def test_an_idle_plan_is_answered(runner: ModelRunner) -> None:
    client = RunnerClient(runner)
    client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(3))])
    assert client.run(released=[0]) == {}


def test_a_resumed_sequence_goes_on_as_before(runner: ModelRunner) -> None:
    """State-exact resumption: noise, penalties and min_tokens are functions of the tokens."""
    params = {**SEEDED, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 9, "stop_token_ids": [4, 6]}
    client = RunnerClient(runner)
    whole = client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(8), sample=2, **params)])[0].tokens
    whole += client.decode(0, 11, 14)
    for done in (1, 6, 14):
        tokens = PROMPT + whole[:done]
        entered = sequence(1, tokens, range(30, 38), prompt_len=10, sample=2, **params)
        client.run((1, 0, 7, 0), new=[entered])
        rest = client.run((1, 7, len(tokens) - 7, 1))[1].tokens
        rest += client.decode(1, len(tokens) + 1, 14 - done)
        assert whole[:done] + rest == whole
        client.run(released=[1])


def test_fork_and_copy_on_write(runner: ModelRunner) -> None:
    """Children share the prompt's blocks; the next plan copies the partial one for all but one of them."""
    alone = []
    for sample in range(3):
        client = RunnerClient(runner)
        entered = sequence(0, PROMPT, range(8), sample=sample, **SEEDED)
        alone.append(client.run((0, 0, 10, 1), new=[entered])[0].tokens + client.decode(0, 11, 9))
    assert len({tuple(tokens) for tokens in alone}) == 3

    client = RunnerClient(runner)
    first = client.run(
        (4, 0, 10, 1),
        new=[sequence(4, PROMPT, [50, 51, 52], **SEEDED)],
        forks=[Fork(4, [(2, 1), (6, 2)])],
    )
    assert sorted(first) == [2, 4, 6]
    got = {slot: first[slot].tokens for slot in (4, 2, 6)}
    writes = [TableWrite(4, 3, [1, 2]), TableWrite(2, 2, [10, 11, 12]), TableWrite(6, 2, [20, 21, 22])]
    rows = client.run((6, 10, 1, 1), (4, 10, 1, 1), (2, 10, 1, 1), writes=writes, copies=[(52, 10), (52, 20)])
    for step in range(9):
        for slot in got:
            got[slot] += rows[slot].tokens
        rows = client.run(*((slot, 11 + step, 1, 1) for slot in got))
    assert [got[4], got[2], got[6]] == alone


def test_swapped_blocks_are_saved_first_and_come_back_last(runner: ModelRunner) -> None:
    """The plan that saves a sequence's blocks gives them to another one, as copies and as what that one computes."""
    client = RunnerClient(runner, host_blocks=4)
    whole = client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, [5, 6, 7])])[0].tokens
    other = PROMPT[::-1]
    expected = client.run((1, 0, 10, 1), new=[sequence(1, other, [20, 21, 22])])[1].tokens
    expected += client.decode(1, 11, 1)
    again = client.run(
        (2, 8, 2, 1),
        new=[sequence(2, other, [5, 6, 7])],
        swap_out=[(7, 3), (5, 0), (6, 1)],
        copies=[(20, 5), (21, 6)],
        released=[0, 1],
    )[2].tokens
    assert again + client.decode(2, 11, 1) == expected
    tokens = PROMPT + whole
    entered = sequence(0, tokens, [5, 30, 31], prompt_len=10)
    rest = client.run((0, 10, 1, 1), new=[entered], swap_in=[(3, 31), (0, 5), (1, 30)], released=[2])[0].tokens
    whole += rest + client.decode(0, 12, 0)
    undisturbed = RunnerClient(runner)
    first = undisturbed.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(3))])[0].tokens
    assert first + undisturbed.decode(0, 11, 1) == whole


def test_a_fork_needs_a_parent(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="slot 4 forks"):
        RunnerClient(runner).run(forks=[Fork(4, [(2, 1)])])


def test_logprobs_of_output(runner: ModelRunner, model: PreTrainedModel) -> None:
    client = RunnerClient(runner)
    row = client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(4), logprobs=3)])[0]
    expected = torch.log_softmax(reference_logits(model, PROMPT)[-1], -1)
    assert row.logprobs is not None
    (entry,) = row.logprobs
    assert entry.rank == 1
    assert entry.top_ids == expected.topk(3).indices.tolist()
    assert entry.top_logprobs == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
    assert entry.logprob == entry.top_logprobs[0]


@pytest.mark.parametrize("chunks", [[10], [1, 9], [4, 5, 1], [9, 1], [1] * 10], ids=str)
def test_logprobs_of_the_prompt(runner: ModelRunner, model: PreTrainedModel, chunks: list[int]) -> None:
    """LGP-02, LGP-08."""
    client = RunnerClient(runner)
    entries, start = [], 0
    client.run((1, 0, 10, 1), new=[sequence(1, PROMPT, range(30, 34))])  # a neighbour that without log-probabilities
    entered = [sequence(0, PROMPT, range(4), prompt_logprobs=2)]
    for count in chunks:
        last = start + count == 10
        rows = client.run((1, 9, 1, 0), (0, start, count, int(last)), new=entered)
        assert 1 not in rows
        if 0 in rows:
            assert len(rows[0].tokens) == int(last)
            entries += rows[0].prompt_logprobs or []
        start, entered = start + count, []
    expected = torch.log_softmax(reference_logits(model, PROMPT), -1)
    assert len(entries) == 9
    for position, entry in enumerate(entries, 1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(row[PROMPT[position]].item(), abs=1e-4)
        assert entry.rank == int((row > row[PROMPT[position]]).sum()) + 1
        assert entry.top_ids == row.topk(2).indices.tolist()
    assert 0 not in {entry.rank for entry in entries}
    decoded = client.run((0, 10, 1, 1))
    assert decoded[0].prompt_logprobs is None


def test_scoring_without_sampling(runner: ModelRunner) -> None:
    client = RunnerClient(runner)
    rows = client.run((0, 0, 10, 0), new=[sequence(0, PROMPT, range(3), prompt_logprobs=0, max_tokens=0)])
    assert rows[0].tokens == []
    assert [entry.top_ids for entry in rows[0].prompt_logprobs or []] == [[]] * 9


def test_results_travel(runner: ModelRunner) -> None:
    client = RunnerClient(runner)
    new = [sequence(0, PROMPT, range(3), prompt_logprobs=2, logprobs=2)]
    runner.execute(StepPlan(epoch=client.epoch, step=0, rows=[], new_sequences=new))
    rows = StepPlan(epoch=client.epoch, step=1, rows=[Row(0, 0, 10, 1)])
    result = runner.execute(rows)
    assert decode_from_worker(encode(result)) == result


def test_a_configuration_starts_from_nothing(runner: ModelRunner, model: PreTrainedModel) -> None:
    RunnerClient(runner).run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(3))])
    client = RunnerClient(runner, slots=2, blocks=10, block_size=16, max_model_len=40)
    got = client.run((1, 0, 10, 1), new=[sequence(1, PROMPT, [8, 3, 5])])[1].tokens + client.decode(1, 11, 9)
    assert got == greedy(model, PROMPT, 10)


def test_the_last_position_and_a_stray_row_behind_it(runner: ModelRunner) -> None:
    client = RunnerClient(runner, max_model_len=12)
    client.run((0, 0, 10, 1), new=[sequence(0, PROMPT, range(3))])
    client.decode(0, 11, 2)


def test_a_broken_model_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        start_runner(WorkerConfig(model=str(tmp_path), device="cpu"))


def test_a_plan_before_any_configuration_is_an_error(model: PreTrainedModel, tmp_path: Path) -> None:
    fresh = start_runner(WorkerConfig(model=str(save(model, tmp_path)), device="cpu", num_threads=1))
    with pytest.raises(RuntimeError, match="before any configuration"):
        fresh.execute(StepPlan(epoch=Epoch(boot_id="x", count=0), step=0, rows=[]))
