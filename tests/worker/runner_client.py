"""Drives a runner under test with plans that the test writes."""

from collections.abc import Sequence
from typing import Any

from services.worker.interface import Runner
from shared.protocol import (
    Configure,
    Epoch,
    Fork,
    NewSequence,
    Row,
    SampledRow,
    Sampling,
    StepPlan,
    TableWrite,
    pack_tokens,
)


class RunnerClient:
    """Configures a runner, and numbers its steps."""

    def __init__(
        self,
        runner: Runner,
        *,
        slots: int = 8,
        blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        host_blocks: int = 0,
    ) -> None:
        self.runner = runner
        self.epoch = Epoch(boot_id="test", count=1)
        self.step = 0
        runner.configure(
            Configure(
                epoch=self.epoch,
                block_size=block_size,
                num_blocks=blocks,
                max_num_seqs=slots,
                max_model_len=max_model_len,
                max_num_batched_tokens=512,
                num_host_blocks=host_blocks,
            )
        )

    def run(
        self,
        *rows: tuple[int, int, int, int],
        new: Sequence[NewSequence] = (),
        forks: Sequence[Fork] = (),
        writes: Sequence[TableWrite] = (),
        copies: Sequence[tuple[int, int]] = (),
        released: Sequence[int] = (),
        swap_out: Sequence[tuple[int, int]] = (),
        swap_in: Sequence[tuple[int, int]] = (),
        adapters: Sequence[tuple[int, int]] = (),
    ) -> dict[int, SampledRow]:
        """Execute one step with `rows` of (slot, start, count, samples), and return the results by slot."""
        plan = StepPlan(
            epoch=self.epoch,
            step=self.step,
            rows=[Row(*row) for row in rows],
            new_sequences=list(new),
            forks=list(forks),
            table_writes=list(writes),
            block_copies=list(copies),
            released_slots=list(released),
            swap_out=list(swap_out),
            swap_in=list(swap_in),
            adapter_slots=list(adapters),
        )
        result = self.runner.launch(plan).result()
        assert (result.epoch, result.step) == (self.epoch, self.step)
        assert result.seconds > 0
        self.step += 1
        by_slot = {row.slot: row for row in result.rows}
        assert len(by_slot) == len(result.rows)
        return by_slot

    def decode(self, slot: int, length: int, count: int) -> list[int]:
        """Return `count` more tokens of a sequence that has `length`, and all its blocks in its table."""
        return [self.run((slot, length - 1 + i, 1, 1))[slot].tokens[0] for i in range(count)]


def sequence(
    slot: int, tokens: Sequence[int], blocks: Sequence[int], *, prompt_len: int | None = None, sample: int = 0,
    adapter_slot: int = -1, **params: Any,
) -> NewSequence:  # fmt: skip
    """Return a sequence that is greedy unless `params` say otherwise."""
    sampling = Sampling(**({"max_tokens": 64, "seed": 0, "temperature": 0.0} | params))
    return NewSequence(
        slot=slot,
        tokens=pack_tokens(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        blocks=list(blocks),
        sampling=sampling,
        sample=sample,
        adapter_slot=adapter_slot,
    )
