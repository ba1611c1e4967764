"""`Gateway`: what every handler needs, and `Job`: one prompt made ready to be submitted."""

from array import array

from aiohttp import web
from msgspec import Struct

from services.gateway.backend import Backend
from services.gateway.bounds import MIB, body_size
from services.gateway.config import GatewayConfig
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.prompt import Prompt
from services.gateway.sampling import with_room
from shared.errors import InvalidRequest, Unavailable
from shared.params import SamplingParams
from shared.protocol import Sampling, Welcome


class Job(Struct, frozen=True):
    """One prompt with its sampling, checked against the model's limits."""

    tokens: "array[int]"
    params: SamplingParams
    sampling: Sampling
    priority: int
    arrived: float  # on the monotonic clock
    samples_before: int = 0  # samples of the same request before the first of these
    echo: str | None = None  # text that is shown before the output
    offsets: "array[int] | None" = None  # where in the prompt's text each token begins, if that is needed


class Gateway(Struct, frozen=True):
    """The parts of one gateway process."""

    config: GatewayConfig
    model: ServedModel
    backend: Backend
    metrics: Metrics
    lifecycle: Lifecycle

    def check_ready(self) -> None:
        """Raises `Unavailable`, saying why, unless requests can make progress."""
        if self.lifecycle.draining:
            raise Unavailable("the server is draining: it ends once its running requests have ended")
        if self.backend.welcome is None:
            raise Unavailable("the server is starting: no engine has answered yet")
        if not self.backend.ready():
            statuses = self.backend.statuses().values()
            draining = bool(statuses) and all(status.draining for status in statuses)
            raise Unavailable(
                "every engine is draining" if draining else "no engine has a worker that can make progress"
            )

    @property
    def welcome(self) -> Welcome:
        """What the engines said of themselves. Raises `Unavailable` before the first has answered."""
        if self.backend.welcome is None:
            raise Unavailable("no engine is ready yet")
        return self.backend.welcome

    @property
    def max_body_size(self) -> int:
        """Bytes that a request's body may have: as it was set, or as the model's context asks for."""
        if self.config.max_body_size is not None:
            return self.config.max_body_size * MIB
        return body_size(self.backend.welcome.max_model_len if self.backend.welcome else 0)

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        default_max_tokens: int | None,
        priority: int,
        arrived: float,
        samples_before: int = 0,
        echo: bool = False,
    ) -> Job:
        """Raises `InvalidRequest` if the prompt or the parameters are beyond the model's limits."""
        welcome = self.welcome
        self._check_logprobs(params)
        params = with_room(params, default_max_tokens, welcome.max_model_len - len(prompt.tokens))
        sampling = params.lower(
            prompt_len=len(prompt.tokens),
            max_model_len=welcome.max_model_len,
            vocab_size=welcome.model.vocab_size,
            eos_token_ids=self.model.tokenizer.eos_token_ids,
        )
        text = self._text(prompt) if echo else None
        return Job(prompt.tokens, params, sampling, priority, arrived, samples_before, text, prompt.offsets)

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self.config.max_logprobs
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > most:
                raise InvalidRequest(f"{name} must be at most {most} (--max-logprobs), got {count}", name)

    def _text(self, prompt: Prompt) -> str:
        """Return what an echo shows: a text as it was given, and of tokens all that they stand for.

        The output may yet complete a character that the tokens end inside of, so it shows that.
        """
        if prompt.text is not None:
            return prompt.text
        return self.model.tokenizer.decode(prompt.tokens, skip_special_tokens=False, final=False)


GATEWAY = web.AppKey("gateway", Gateway)
PATHS = web.AppKey("paths", dict[str, str])
"""The declared path of each resource, by its canonical one, which may begin with --root-path."""

REQUEST_ID = web.RequestKey("id", str)
