"""`reasoning_limit`: what `thinking_token_budget` means for a model, by the tokens that mark its reasoning."""

from collections.abc import Sequence

from shared.errors import InvalidRequest
from shared.protocol import ReasoningLimit
from shared.text import reasoning_parsers
from shared.text.message_parser import MessageFormat, ParserChoice

FIELD = "thinking_token_budget"


def reasoning_limit(
    max_tokens: int | None, choice: ParserChoice, prompt: Sequence[int], format: MessageFormat | None
) -> ReasoningLimit | None:
    """Return the limit of an output's reasoning; None if `max_tokens` is None.

    `format` is that of a chat's output. Without one, the prompt is no chat's: it ends inside reasoning if it has a
    beginning of reasoning and no end behind that. Raise `InvalidRequest` unless a model with these parsers can be held
    to a limit: each marker of its reasoning has to be one token, since only a token can be forced and surely found.
    """
    if max_tokens is None:
        return None
    if choice.reasoning is None:
        raise InvalidRequest(
            f"{FIELD} is not supported here: no parser of reasoning fits this model's chat template; "
            "--reasoning-parser NAME, or reasoning_parser of LLM, chooses one",
            FIELD,
        )
    family = reasoning_parsers.FAMILIES.get(choice.reasoning)
    ids = choice.token_ids
    if family is None or not all(marker in ids for marker in family.begins + family.ends):
        raise InvalidRequest(
            f"{FIELD} is not supported with this model (parser {choice.reasoning}): the beginning and the end of its "
            "reasoning are not one token each",
            FIELD,
        )
    begins = [ids[marker] for marker in family.begins]
    ends = [ids[marker] for marker in family.ends + family.also_ends if marker in ids]
    if format is not None:
        is_open = format.reasoning_is_open
    else:
        is_open = next((token in begins for token in reversed(prompt) if token in begins or token in ends), False)
    return ReasoningLimit(max_tokens, begins, ends, is_open)
