"""Writes the message of a chat whose output is taken apart into content, reasoning and tool calls.

Reasoning has both of its names: vLLM's newer one, and the older one that more clients know.
"""

from collections.abc import Sequence
from typing import Any

from services.gateway.api_requests import ChatRequest
from services.gateway.generation import Generation
from services.gateway.tools import named_tool
from shared.protocol import FinishReason
from shared.text.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from shared.text.logprobs import LogprobEntry
from shared.text.messages import REASONING, text_of


def answering_role(request: ChatRequest) -> str:
    """Return the role of the answer: without a generation prompt, the model goes on in the last message's role."""
    return "assistant" if request.add_generation_prompt is not False else str(request.messages[-1].get("role"))


def echo_of(request: ChatRequest) -> str:
    """Return the text that comes before the answer: that of the last message, if it is of the role that answers."""
    last = request.messages[-1]
    return text_of(last.get("content"), "\n") if request.echo and last.get("role") == answering_role(request) else ""


def finish_reason(request: ChatRequest, generation: Generation, sample: int) -> str | None:
    """Return the finish reason that a client sees: `tool_calls` if the model stopped after complete calls.

    As with OpenAI, it stays `stop` after a call that the client has named.
    """
    reason = generation.text.samples[sample].finish_reason
    if reason != FinishReason.STOP.value or named_tool(request.tool_choice) is not None:
        return reason
    return "tool_calls" if generation.parsers and generation.parsers[sample].has_calls else reason


class MessageReader:
    """Feeds the text of one sample to its parser, and writes what that finds as parts of a message."""

    def __init__(self, request: ChatRequest, generation: Generation, sample: int) -> None:
        self._parser = generation.parsers[sample]
        self._sample = generation.text.samples[sample]
        self._shows_reasoning = request.include_reasoning is not False
        self._with_reasoning = self._shows_reasoning and generation.num_reasoning_tokens is not None
        self._pending: list[LogprobEntry] = []

    def read(self, text: str, logprobs: Sequence[LogprobEntry]) -> dict[str, Any]:
        """Return the delta of a chunk for a piece of text; {} if there is nothing to show yet.

        The log-probabilities wait for the next chunk.
        """
        deltas = self._parser.feed(text)
        if self._sample.finish_reason is not None:
            deltas += self._parser.finish()
        self._pending += self.visible(logprobs)
        return self._fields(deltas)

    def take_logprobs(self) -> list[LogprobEntry]:
        """Return the log-probabilities of the next chunk."""
        pending, self._pending = self._pending, []
        return pending

    def read_whole(self, text: str) -> dict[str, Any]:
        """Return the fields of the message for the whole text. The content of a message without any is null."""
        fields = self._fields(self._parser.feed(text) + self._parser.finish())
        message: dict[str, Any] = {"content": fields.get("content", None if fields else "")}
        if self._with_reasoning:
            message |= {name: fields.get(name) for name in REASONING}
        if calls := fields.get("tool_calls"):
            message["tool_calls"] = [
                {"id": call["id"], "type": call["type"], "function": call["function"]} for call in calls
            ]
        return message

    def visible(self, logprobs: Sequence[LogprobEntry]) -> list[LogprobEntry]:
        """Return the entries without those of reasoning that is not shown."""
        if self._shows_reasoning:
            return list(logprobs)
        return [entry for entry in logprobs if not self._parser.is_reasoning(entry.offset)]

    def _fields(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the fields of a delta. A chunk names each part once, since clients take a list's items by index."""
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            match delta:
                case Content():
                    fields["content"] = fields.get("content", "") + delta.text
                case Reasoning() if self._shows_reasoning:
                    for name in REASONING:
                        fields[name] = fields.get(name, "") + delta.text
                case CallBegin():
                    function = {"name": delta.name, "arguments": ""}
                    calls[delta.index] = {
                        "index": delta.index,
                        "id": delta.id,
                        "type": "function",
                        "function": function,
                    }
                case CallArguments():
                    call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += delta.text
        return fields | {"tool_calls": list(calls.values())} if calls else fields
