"""`Gateway`: the parts of one gateway process, and aiohttp's keys under which handlers find them."""

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import Struct

from services.gateway.backend import Backend
from services.gateway.bounds import MIB, max_body_size
from services.gateway.config import GatewayConfig
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import Metrics
from services.gateway.prompt import PreparedPrompt, TokenizedPrompt
from services.gateway.served_model import ServedModel
from services.gateway.stream_writes import StreamWrites
from shared.beam_params import BeamSettings
from shared.errors import InvalidRequest, Unavailable
from shared.params import SamplingParams
from shared.protocol import Welcome
from shared.text.message_parser import MessageFormat
from shared.text.reasoning_limit import reasoning_limit


class Gateway(Struct, frozen=True):
    """The parts of one gateway process."""

    config: GatewayConfig
    model: ServedModel
    backend: Backend
    metrics: Metrics
    lifecycle: Lifecycle
    stream_writes: StreamWrites = msgspec.field(default_factory=StreamWrites)

    def check_ready(self, num_engines: int = 1) -> None:
        """Raise `Unavailable`, with the reason, unless requests can make progress at `num_engines` engines.

        With 0 engines, raise it unless this gateway accepts requests, which then may have to wait for an engine.
        """
        if self.lifecycle.draining:
            raise Unavailable("the server is draining: it takes no new requests")
        if self.backend.unusable:
            raise Unavailable(self.backend.unusable)
        if self.backend.welcome is None:
            raise Unavailable("the server is starting: no engine has answered yet")
        if num_engines and not self.backend.ready():
            statuses = self.backend.statuses().values()
            draining = bool(statuses) and all(status.draining for status in statuses)
            raise Unavailable(
                "every engine is draining" if draining else "no engine has a worker that can make progress"
            )
        if not self.backend.ready(num_engines):
            raise Unavailable(f"fewer than {num_engines} engines have a worker that can make progress")

    async def choose_adapter(self, model: str | None) -> str:
        """Return the name of the adapter that a request's `model` names; empty for the served model itself.

        Raise `UnknownModel` if it names neither. Before an engine has answered, wait for one, or raise as
        `Backend.first_welcome` does.
        """
        if model is None or model in self.model.names:
            return ""
        if not self.backend.adapters:
            await self.backend.first_welcome()
        self.model.check(model, self.backend.adapters)
        return model

    @property
    def max_body_size(self) -> int:
        """Return the maximum size of a request's body in bytes: --max-body-size, or what the model's context needs."""
        if self.config.max_body_size is not None:
            return self.config.max_body_size * MIB
        return max_body_size(self.backend.welcome.max_model_len if self.backend.welcome else 0)

    def prepare(
        self,
        prompt: TokenizedPrompt,
        welcome: Welcome,
        params: SamplingParams,
        *,
        default_max_tokens: int | None,
        priority: int,
        arrived: float,
        request_id: str,
        samples_before: int = 0,  # samples of the same user's request in earlier prompts
        echo: bool = False,
        grammar: str = "",  # that the output has to follow
        bad_words: Sequence[Sequence[int]] = (),  # as sequences of tokens
        cache_salt: str = "",
        adapter: str = "",
        format: MessageFormat | None = None,
        beams: BeamSettings | None = None,
        shows_text: bool = False,  # in the answer, apart from an echo
        lacks_template: bool = False,  # the model's, if it has one
        field: str = "prompt",  # that has the prompt, for errors
    ) -> PreparedPrompt:
        """Return a prompt that is ready to be submitted. Raise `InvalidRequest` if it exceeds the model's limits.

        An engine's `welcome` has those.
        """
        self._check_logprobs(params)
        sampling = params.to_sampling(
            prompt_len=len(prompt.tokens),
            max_model_len=welcome.max_model_len,
            vocab_size=welcome.model.vocab_size,
            eos_token_ids=self.model.tokenizer.eos_token_ids,
            default_max_tokens=default_max_tokens,
            grammar=grammar,
            bad_words=bad_words,
            reasoning_limit=reasoning_limit(params.max_reasoning_tokens, self.model.parsers, prompt.tokens, format),
            prompt_field=field,
        )
        if beams is not None:
            beams.check(len(prompt.tokens), sampling, welcome.model.vocab_size)
        return PreparedPrompt(
            prompt.tokens,
            params,
            sampling,
            priority=priority,
            arrived=arrived,
            request_id=request_id,
            samples_before=samples_before,
            echo=prompt.text if echo else None,
            offsets=prompt.offsets,
            format=format,
            cache_salt=cache_salt,
            beams=beams,
            text=prompt.text if shows_text else None,
            adapter=adapter,
            lacks_template=lacks_template and self.model.template.exists,
        )

    def _check_logprobs(self, params: SamplingParams) -> None:
        limit = self.config.max_logprobs
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > limit:
                raise InvalidRequest(f"{name} must be at most {limit} (--max-logprobs), got {count}", name)


GATEWAY = web.AppKey("gateway", Gateway)

ROUTE_PATHS = web.AppKey("route paths", dict[str, str])
"""Each route's path without --root-path, by its full path: a route is served with and without --root-path."""

REQUEST_ID = web.RequestKey("id", str)
"""The id that the client has sent or is given: the header X-Request-Id of the response."""

RESPONSE_ID = web.RequestKey("response id", str)
"""The `id` of a response that generates, which has `REQUEST_ID` in it. Logs name such a request by it."""


def begin_response(request: web.Request, prefix: str, requested_id: str | None = None) -> str:
    """Return the id of a response, which begins with `prefix`, and under which it is logged from now on.

    After that comes the id of the header X-Request-Id, or else the one that the body requests, or else a new one.
    """
    if requested_id is not None and request.headers.get("X-Request-Id") != request[REQUEST_ID]:
        request[REQUEST_ID] = requested_id
    id = request[RESPONSE_ID] = f"{prefix}{request[REQUEST_ID]}"
    return id


def logged_id(request: web.Request) -> str:
    """Return the id under which a request is logged."""
    return request.get(RESPONSE_ID) or request[REQUEST_ID]
