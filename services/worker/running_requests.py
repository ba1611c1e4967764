"""`RunningRequests`: which request is in which slot, so that a step that fails can name its requests in the log.

It follows plans a step late: what a plan changes counts once its step is done. So when a step fails, the slots are as
they were in that step, although later plans may have been launched. It costs nothing for rows.
"""

from collections import deque

from shared.protocol import StepPlan


class RunningRequests:
    """The requests of one connection, by the ids that their clients see."""

    def __init__(self) -> None:
        self._by_slot: dict[int, str] = {}
        self._launched: deque[StepPlan] = deque()  # not done yet

    def launch(self, plan: StepPlan) -> None:
        """Note that a plan is to be computed, after those before it."""
        self._launched.append(plan)

    def finish(self) -> None:
        """Note that the oldest step is done."""
        self._apply(self._launched.popleft())

    def of_step(self, plan: StepPlan) -> list[str]:
        """Return the requests of a plan that was launched and has failed. Call it last."""
        while self._launched:
            self._apply(done := self._launched.popleft())
            if done is plan:
                break
        return [self._by_slot.get(row.slot, "") for row in plan.rows]

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            self._by_slot.pop(slot, None)
        for new in plan.new_sequences:
            self._by_slot[new.slot] = new.request_id
        for fork in plan.forks:
            for slot, _ in fork.children:
                self._by_slot[slot] = self._by_slot.get(fork.parent, "")
