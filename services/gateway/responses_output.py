"""Makes the output items of a response, and the events that tell of them, from the text of its sample.

Items come one after the other, in the order of the text: reasoning, messages and calls. A stream sends the events; for
a whole answer they are dropped, so that both have the same items.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar, cast

from services.gateway.api_responses import ContentLogprob
from services.gateway.generation import Generation
from services.gateway.logprobs import chat_logprobs
from services.gateway.responses_objects import (
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    StreamEvent,
)
from shared.protocol import FinishReason
from shared.text.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from shared.text.logprobs import LogprobEntry

OpenItemT = TypeVar("OpenItemT", bound="_OpenItem")


class _OpenItem(ABC):
    """An item of which more may come."""

    prefix = ""  # of its id

    def __init__(self, index: int) -> None:
        self.index, self.id = index, f"{self.prefix}_{uuid.uuid4().hex}"
        self._pieces: list[str] = []

    def begin(self) -> Iterator[StreamEvent]:
        """Yield the first events."""
        yield OutputItemAdded(output_index=self.index, item=self.item("in_progress", is_empty=True))

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """Yield the last events."""
        yield OutputItemDone(output_index=self.index, item=self.item(status))

    @abstractmethod
    def item(self, status: ItemStatus, *, is_empty: bool = False) -> Item:
        """Return the item as it is now; if it `is_empty`, before its first part."""

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class _OpenReasoning(_OpenItem):
    prefix = "rs"

    def item(self, status: ItemStatus, *, is_empty: bool = False) -> ReasoningItem:
        return ReasoningItem(self.id, status, [] if is_empty else [ReasoningText(self.text)])

    def begin(self) -> Iterator[StreamEvent]:
        yield from super().begin()
        yield ContentPartAdded(item_id=self.id, output_index=self.index, part=ReasoningText(""))

    def add(self, text: str) -> StreamEvent:
        self._pieces.append(text)
        return ReasoningTextDelta(item_id=self.id, output_index=self.index, delta=text)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        yield ReasoningTextDone(item_id=self.id, output_index=self.index, text=self.text)
        yield ContentPartDone(item_id=self.id, output_index=self.index, part=ReasoningText(self.text))
        yield from super().end(status)


class _OpenMessage(_OpenItem):
    prefix = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[ContentLogprob] = []

    def item(self, status: ItemStatus, *, is_empty: bool = False) -> MessageItem:
        return MessageItem(self.id, status, [] if is_empty else [self._part])

    def begin(self) -> Iterator[StreamEvent]:
        yield from super().begin()
        yield ContentPartAdded(item_id=self.id, output_index=self.index, part=OutputText(""))

    def add(self, text: str, logprobs: list[ContentLogprob]) -> StreamEvent:
        self._pieces.append(text)
        self._logprobs += logprobs
        return OutputTextDelta(item_id=self.id, output_index=self.index, delta=text, logprobs=logprobs)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        part = self._part
        yield OutputTextDone(item_id=self.id, output_index=self.index, text=part.text, logprobs=part.logprobs)
        yield ContentPartDone(item_id=self.id, output_index=self.index, part=part)
        yield from super().end(status)

    @property
    def _part(self) -> OutputText:
        return OutputText(self.text, logprobs=self._logprobs)


class _OpenCall(_OpenItem):
    prefix = "fc"

    def __init__(self, index: int, call: CallBegin) -> None:
        super().__init__(index)
        self._call = call

    def item(self, status: ItemStatus, *, is_empty: bool = False) -> FunctionCallItem:
        return FunctionCallItem(self.id, status, self._call.id, self._call.name, self.text)

    def add(self, text: str) -> StreamEvent:
        self._pieces.append(text)
        return FunctionCallArgumentsDelta(item_id=self.id, output_index=self.index, delta=text)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        name, text = self._call.name, self.text
        yield FunctionCallArgumentsDone(item_id=self.id, output_index=self.index, name=name, arguments=text)
        yield from super().end(status)


class OutputBuilder:
    """Takes the text of a generation's only sample, and makes items of it.

    With log-probabilities, the text is read token by token, so that each part of a message has those of its tokens. A
    token that belongs to reasoning or to a call is in none.
    """

    def __init__(self, generation: Generation) -> None:
        self.items: list[Item] = []  # those that have ended
        self._parser = generation.parsers[0] if generation.parsers else None
        self._sample = generation.text.samples[0]
        self._open: _OpenItem | None = None
        self._num_read = 0  # characters
        self._entries: list[LogprobEntry] = []  # of tokens whose text was read, and is in no item yet

    @property
    def was_cut(self) -> bool:
        """Return whether the output has ended because it may have no more tokens."""
        return self._sample.finish_reason == FinishReason.LENGTH.value

    def feed(self, text: str, entries: Sequence[LogprobEntry]) -> list[StreamEvent]:
        """Return the events of a piece of text, with the log-probabilities that have come. End if the sample has."""
        events: list[StreamEvent] = []
        for piece, entry in self._tokens(text, entries):
            if entry is not None:
                self._entries.append(entry)
            events += self._add_all(self._parse(piece))
        if self._sample.finish_reason is not None:
            events += self._finish()
        return events

    def _tokens(self, text: str, entries: Sequence[LogprobEntry]) -> Iterator[tuple[str, LogprobEntry | None]]:
        """Yield the text in pieces, each with the token that begins there. A token may have no text of its own."""
        start, end = self._num_read, self._num_read + len(text)
        self._num_read = end
        offsets = [min(max(entry.offset, start), end) for entry in entries]
        yield text[: offsets[0] - start if offsets else None], None
        for entry, begin, next_begin in zip(entries, offsets, [*offsets, end][1:], strict=True):
            yield text[begin - start : next_begin - start], entry

    def _parse(self, text: str) -> Sequence[Delta]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [Content(text)] if text else []

    def _finish(self) -> Iterator[StreamEvent]:
        """Yield the last events of the output, which has at least one item."""
        if self._parser is not None:
            yield from self._add_all(self._parser.finish())
        if not self.items and self._open is None:
            yield from self._begin(_OpenMessage)
        if isinstance(self._open, _OpenMessage) and (logprobs := self._take_logprobs()):
            yield self._open.add("", logprobs)
        yield from self._end("incomplete" if self._is_cut_off else "completed")

    @property
    def _is_cut_off(self) -> bool:
        """Return whether the last item is not whole."""
        is_call = isinstance(self._open, _OpenCall)
        return self.was_cut or (is_call and self._parser is not None and not self._parser.has_calls)

    def _add_all(self, deltas: Sequence[Delta]) -> Iterator[StreamEvent]:
        for delta in deltas:
            yield from self._add(delta)

    def _add(self, delta: Delta) -> Iterator[StreamEvent]:
        current = self._open
        match delta:
            case Content():
                message = current if isinstance(current, _OpenMessage) else (yield from self._begin(_OpenMessage))
                yield message.add(delta.text, self._take_logprobs())
            case Reasoning():
                reasoning = current if isinstance(current, _OpenReasoning) else (yield from self._begin(_OpenReasoning))
                yield reasoning.add(delta.text)
            case CallBegin():
                yield from self._begin(partial(_OpenCall, call=delta))
            case CallArguments():
                yield cast(_OpenCall, current).add(delta.text)
        self._entries.clear()  # of a token in reasoning or in a call

    def _begin(self, make: Callable[[int], OpenItemT]) -> Generator[StreamEvent, None, OpenItemT]:
        """End the item before, and return a new one."""
        yield from self._end("completed")
        self._open = item = make(len(self.items))
        yield from item.begin()
        return item

    def _end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.item(status))
            self._open = None

    def _take_logprobs(self) -> list[ContentLogprob]:
        """Return the log-probabilities of tokens that were read since the last ones were taken, in JSON already."""
        entries, self._entries = self._entries, []
        parser = self._parser
        shown = [entry for entry in entries if parser is None or not parser.is_reasoning(entry.offset)]
        return cast(list[ContentLogprob], chat_logprobs(shown)["content"])
