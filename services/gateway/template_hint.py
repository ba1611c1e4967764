"""Says in the log that an empty completion may lack the chat template, since its client sees neither text nor error."""

import logging
from collections.abc import Sequence

from services.gateway.prompt import PreparedPrompt
from shared.log_format import of_request
from shared.log_limit import LIMITED, LogLimit
from shared.text.raw_prompts import ended_at_once
from shared.text.sample_text import SampleText
from shared.text.tokenizer import Tokenizer

INTERVAL = 60.0
"""Seconds between two such lines. All completions of a client that asks the wrong endpoint would have one."""

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit(max_lines=1, interval=INTERVAL))


def hint_at_template(prompt: PreparedPrompt, samples: Sequence[SampleText], tokenizer: Tokenizer) -> None:
    """Log a line if a completion's prompt seems to have needed the model's chat template."""
    if prompt.lacks_template and ended_at_once(prompt.tokens, samples, prompt.sampling, tokenizer):
        logger.warning(
            "a completion is empty: the model ended it at once. It is a chat model, and /v1/completions does not apply "
            "its chat template; /v1/chat/completions does",
            extra={**of_request(prompt.request_id), **LIMITED},
        )
