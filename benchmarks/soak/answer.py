"""`Answer`: what a stream said, put together so that it can be compared with another run of the same request."""

import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientResponse
from msgspec import Struct

MAX_LINE = 2**20
"""Bytes of a line. A chunk may hold several tokens, each with its log-probabilities."""


class StreamFailed(Exception):
    """The stream ended with an error, or without the event that ends it."""


class Choice(Struct):
    """One sample's text, log-probabilities and ends. There should be one end."""

    text: str = ""
    logprobs: list[float] = []
    finish_reasons: list[str] = []


class Answer(Struct):
    """All samples by index, and the tokens of prompt and samples, which come last."""

    choices: dict[int, Choice] = {}
    usage: tuple[int, int] | None = None

    @property
    def has_text(self) -> bool:
        return any(choice.text for choice in self.choices.values())

    def take(self, chunk: dict[str, Any]) -> None:
        """Append what a chunk of either endpoint brings."""
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
            choice.logprobs += _logprobs(part.get("logprobs") or {})
            if part["finish_reason"] is not None:
                choice.finish_reasons.append(part["finish_reason"])
        if usage := chunk.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])

    def begins(self, other: "Answer") -> bool:
        """Return whether this is the beginning of the undisturbed answer `other`."""
        whole = other.choices
        return all(
            index in whole
            and whole[index].text.startswith(choice.text)
            and whole[index].logprobs[: len(choice.logprobs)] == choice.logprobs
            for index, choice in self.choices.items()
        )

    def difference(self, other: "Answer") -> str:
        """Return in a line how this differs from the undisturbed answer `other`; empty if it does not."""
        if self.usage != other.usage:
            return f"usage is {self.usage} instead of {other.usage}"
        if self.choices.keys() != other.choices.keys():
            return f"choices are {sorted(self.choices)} instead of {sorted(other.choices)}"
        for index, choice in self.choices.items():
            undisturbed = other.choices[index]
            if choice.finish_reasons != undisturbed.finish_reasons:
                return f"choice {index} ends with {choice.finish_reasons} instead of {undisturbed.finish_reasons}"
            if choice.text != undisturbed.text:
                return f"choice {index} is {choice.text!r} instead of {undisturbed.text!r}"
            if choice.logprobs != undisturbed.logprobs:
                return f"choice {index} has other log-probabilities"
        return ""


def _logprobs(logprobs: dict[str, Any]) -> list[float]:
    """Return those of the chosen tokens, and those of the best ones behind each, from either endpoint's form."""
    values: list[float] = []
    for entry in logprobs.get("content") or []:
        values += [entry["logprob"], *(best["logprob"] for best in entry["top_logprobs"])]
    for own, best in zip(logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or [], strict=True):
        values += [own, *best.values()]
    return values


async def read_chunks(response: ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream. Raise `StreamFailed` if it does not end as it should."""
    while line := await response.content.readline(max_line_length=MAX_LINE):
        if not line.startswith(b"data: "):
            continue  # an empty line, or a comment that keeps the connection alive
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise StreamFailed(f"it ended with the error {chunk['error']}")
        yield chunk
    raise StreamFailed("it ended without [DONE]")
