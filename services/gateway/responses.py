"""POST /v1/responses"""

import time

from aiohttp import web

from services.gateway.api_requests import ResponsesRequest
from services.gateway.body import read
from services.gateway.chat import has_much_to_parse, prepare_chat
from services.gateway.gateway import GATEWAY, begin_response
from services.gateway.generation import Generation
from services.gateway.logprobs import has_many_logprobs
from services.gateway.response import json_response
from services.gateway.responses_answer import begun, ended
from services.gateway.responses_events import ResponseEvents
from services.gateway.responses_input import Chat, has_many_parts
from services.gateway.responses_objects import Response
from services.gateway.responses_output import OutputBuilder
from services.gateway.stream import collect, stream_events
from services.gateway.threads import run_in_thread_if


async def responses(http: web.Request) -> web.StreamResponse:
    """Answer with the model's next items (reasoning, a message, calls), whole or as a stream. They are not kept."""
    gateway, arrived = http.app[GATEWAY], time.monotonic()
    begin_response(http, "resp_")
    request = await read(http, ResponsesRequest)
    chat = await run_in_thread_if(has_many_parts(request), Chat, request)  # checks the id, which goes into headers
    id = begin_response(http, "resp_", request.request_id)
    with chat.in_own_words():
        prompt = await prepare_chat(gateway, chat.request, arrived, id)
        response = begun(request, prompt, id, prompt.adapter or gateway.model.name)
        if request.stream:
            return await stream_events(http, gateway, [prompt], ResponseEvents(response))
        generations = await collect(gateway, [prompt])
        takes_long = has_many_logprobs(generations) or has_much_to_parse(generations)
        return await run_in_thread_if(takes_long, _respond, response, *generations)


def _respond(response: Response, generation: Generation) -> web.Response:
    output = OutputBuilder(generation)
    output.feed(generation.text.samples[0].text, generation.logprobs[0])
    return json_response(ended(response, output, generation))
