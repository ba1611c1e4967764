"""The events of a response's stream, in the order of OpenAI's API. Each has its type as a line of its own."""

from collections.abc import Sequence
from typing import get_args

from services.gateway.errors import ApiError
from services.gateway.generation import Generation, Update
from services.gateway.response import to_json
from services.gateway.responses_answer import ended, failed
from services.gateway.responses_objects import (
    Event,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    StreamEvent,
)
from services.gateway.responses_output import OutputBuilder

NAMES = {kind: kind.__struct_config__.tag.encode() for kind in get_args(StreamEvent)}


class ResponseEvents:
    """Encodes the stream of one response. It is an `EventEncoder`."""

    _generation: Generation
    _output: OutputBuilder

    def __init__(self, response: Response) -> None:
        """`response` is as it begins."""
        self._response = response
        self._next_number = 0

    def begin(self, generations: Sequence[Generation]) -> bytes:
        (self._generation,) = generations
        self._output = OutputBuilder(self._generation)
        return self._write([ResponseCreated(response=self._response), ResponseInProgress(response=self._response)])

    async def prepare(self, prompt_index: int, generation: Generation) -> None:
        """Do nothing: no event has the prompt."""

    def openings(self, index: int, generation: Generation) -> bytes:
        return b""

    def update(self, index: int, generation: Generation, update: Update) -> bytes:
        return self._write(self._output.feed(update.text, update.logprobs))

    def end(self) -> bytes:
        response = ended(self._response, self._output, self._generation)
        kind = ResponseIncomplete if response.status == "incomplete" else ResponseCompleted
        return self._write([kind(response=response)])

    def fail(self, error: ApiError) -> bytes:
        return self._write([ResponseFailed(response=failed(self._response, self._output, error))])

    def _write(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(self._encode, events))

    def _encode(self, event: Event) -> bytes:
        event.sequence_number = self._next_number
        self._next_number += 1
        return b"event: %b\ndata: %b\n\n" % (NAMES[type(event)], to_json(event))
