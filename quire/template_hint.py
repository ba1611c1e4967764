"""Says in the log that an empty output may lack the chat template, since its caller sees neither text nor error."""

import logging
from collections.abc import Sequence
from functools import cache

from quire.pending_request import PendingRequest

logger = logging.getLogger(__name__)


def hint_at_template(requests: Sequence[PendingRequest]) -> None:
    """Log a line, once in this process, if a prompt seems to have needed the model's chat template."""
    if any(request.seems_to_lack_template for request in requests):
        log_once()


@cache
def log_once() -> None:
    """Log the line, at the first call."""
    logger.warning(
        "an output is empty: the model ended it at once. It is a chat model, and LLM.generate does not apply its chat "
        "template; LLM.chat does (this is said once)"
    )
