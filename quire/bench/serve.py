"""`quire bench serve`: measures a server of the OpenAI API over HTTP.

For each concurrency it generates requests, sends them, and prints and saves the result. The requests come from the seed
and the number of the run, so that no run finds its prompts in a cache that an earlier one filled.
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, NamedTuple

import aiohttp
import msgspec
import uvloop
from msgspec import Meta, Struct
from tqdm import tqdm

from quire.bench import values
from quire.bench.arrivals import Ramp, arrival_times, milestones, rates
from quire.bench.client import Target, error_message, one_line, read_beginning
from quire.bench.load import Run, session, wait_until_ready
from quire.bench.load import run as run_load
from quire.bench.options import ServeOptions
from quire.bench.output_files import check_writable
from quire.bench.report import MAX_MODEL_NAME, Result, format_report, make_record, result_path, save, summarize
from quire.bench.workload import Request, RequestGenerator
from shared.errors import EngineFailure, ModelError, Unavailable
from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED
from shared.hub.progress import on_terminal
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

ALL_FAILED = 1
MAX_ERRORS_SHOWN = 3

LIST_TIMEOUT = 30.0
"""Seconds that a server may take to list its models."""

MAX_LIST_SIZE = 1024 * 1024
"""Bytes of that list that are read, about."""

Printable = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]+$")]


class _ModelCard(Struct):
    id: Printable
    root: Printable | None = None


class _ModelList(Struct):
    data: list[_ModelCard]


class ModelText(NamedTuple):
    """The model's names, tokenizer and chat template, without its weights."""

    model: str  # its name in reports
    name: str  # its name in requests
    tokenizer_id: str
    tokenizer: Tokenizer
    template: ChatTemplate


def run(options: ServeOptions, environment: Mapping[str, str]) -> int:
    """Measure, print and save; return the exit status. Raise `ConfigError`, `ModelError` and `Unavailable`."""
    if options.plot is not None:
        from quire.bench.chart import check_library

        check_library()
        check_writable("--plot", options.plot)
    if options.save_result or options.append_result:
        longest = result_path(options, max(options.max_concurrency or [0]), "m" * MAX_MODEL_NAME, datetime.now())
        check_writable("--result-dir or --result-filename", longest)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(_Serve(options, environment).run())
    if options.plot is not None:
        from quire.bench.chart import draw

        draw(options.plot, results)
        print(f"Chart: {options.plot}")
    return 0 if all(result.totals.completed for result in results) else ALL_FAILED


class _Serve:
    """Runs the command. Raise `ConfigError` for wrong options, before any request is sent."""

    def __init__(self, options: ServeOptions, environment: Mapping[str, str]) -> None:
        chat = options.backend == "openai-chat"
        self.options = options
        self.chat = chat
        self.base = (options.base_url or f"http://{_bracketed(options.host)}:{options.port}").rstrip("/")
        self.endpoint = options.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
        self.headers = {"Content-Type": "application/json"} | values.headers(options, environment)
        self.metadata = values.pairs("--metadata", options.metadata)
        self.goals = values.goals(options)
        self.percentiles = values.percentiles(options)
        self.names = values.latencies(options)
        always = options.dataset_name in ("random", "long-tail")
        self.body = values.body(options, ignore_eos=options.ignore_eos or always)
        values.range_ratios(options)  # only to raise

    async def run(self) -> list[Result]:
        """Make one run for each concurrency, one after the other. SIGTERM ends them as SIGINT does."""
        if threading.current_thread() is threading.main_thread():  # no other thread can
            # Python's own handler would raise inside whichever callback runs, and the loop would lose the exception
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
        model_text = await self._load_text()
        url = self.base + self.endpoint
        target = Target(url, self.chat, model_text.name, self.headers, self.body, self.options.timeout)
        results = []
        for index, concurrency in enumerate(self.options.max_concurrency or [None]):
            results.append(await self._run_once(index, concurrency, model_text, target))
        return results

    async def _run_once(self, index: int, concurrency: int | None, model_text: ModelText, target: Target) -> Result:
        options, now = self.options, datetime.now()
        requests = self._requests(model_text, options.seed + index)
        ramp = _ramp(options)
        request_rates = rates(len(requests), options.request_rate, ramp)
        times = arrival_times(request_rates, options.burstiness, options.seed + index)
        async with session(concurrency, insecure=options.insecure) as http:
            await self._prepare(http, target, requests[0], concurrency)
            load = await self._load(http, target, requests, times, concurrency)
        count_tokens(load, model_text.tokenizer)
        result = summarize(load, concurrency, options.request_rate, self.names, self.percentiles, self.goals)
        print_errors(load)
        print(format_report(result, options.request_rate), flush=True)
        if options.save_result or options.append_result:
            path = result_path(options, concurrency, model_text.model, now)
            record = make_record(
                options,
                result,
                model=model_text.model,
                tokenizer=model_text.tokenizer_id,
                metadata=self.metadata,
                now=now,
            )
            if ramp is not None:
                record["rps_change_events"] = _events(load, milestones(ramp, request_rates, times))
            save(path, record, append=options.append_result)
            print(f"Result: {path}", flush=True)
        return result

    def _requests(self, model_text: ModelText, seed: int) -> list[Request]:
        template = None if self.chat or self.options.skip_chat_template else model_text.template
        if template is not None and not template.exists:
            template = None
        text = self.chat or self.options.text_prompts
        return RequestGenerator(self.options, model_text.tokenizer, seed=seed, text=text, template=template).generate()

    async def _prepare(
        self, http: aiohttp.ClientSession, target: Target, request: Request, concurrency: int | None
    ) -> None:
        """Wait until the server is ready, and warm it up with `request`."""
        seconds = self.options.ready_check_timeout_sec
        if seconds and (error := await wait_until_ready(http, target, request, seconds)):
            raise Unavailable(f"{target.url} is not ready after {seconds} s: {error}")
        if count := self.options.num_warmups:
            await run_load(http, target, [request] * count, [0.0] * count, concurrency, prefix="bench-warmup-")

    async def _load(
        self,
        http: aiohttp.ClientSession,
        target: Target,
        requests: list[Request],
        times: list[float],
        concurrency: int | None,
    ) -> Run:
        prefix = self.options.request_id_prefix
        prefix = f"bench-{datetime.now():%H%M%S%f}-" if prefix is None else prefix
        hidden = self.options.disable_tqdm or not on_terminal()
        with tqdm(total=len(requests), desc="Requests", file=sys.stderr, disable=hidden) as bar:
            return await run_load(http, target, requests, times, concurrency, prefix=prefix, on_done=bar.update)

    async def _load_text(self) -> ModelText:
        options = self.options
        if options.model is None:
            name, model = await self._first_model()
        else:
            name, model = options.served_model_name or options.model, options.model
        tokenizer_id = options.tokenizer or model
        try:
            folder = locate("" if tokenizer_id == EMBEDDED else tokenizer_id)
            tokenizer = Tokenizer.load(folder)
        except ModelError as error:
            raise ModelError(f"no tokenizer (name one with --tokenizer): {error}") from error
        return ModelText(model, name, tokenizer_id, tokenizer, ChatTemplate.load(folder, tokenizer.special))

    async def _first_model(self) -> tuple[str, str]:
        """Return the names of the server's first model and of its root. Raise `Unavailable` or `EngineFailure`."""
        url = f"{self.base}/v1/models"
        try:
            async with (
                asyncio.timeout(LIST_TIMEOUT),
                session(None, insecure=self.options.insecure) as http,
                http.get(url, headers=self.headers) as response,
            ):
                body = await read_beginning(response, MAX_LIST_SIZE)
        except TimeoutError as error:
            raise Unavailable(f"{url} does not answer in {LIST_TIMEOUT:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an invalid URL
            raise Unavailable(f"{url} cannot be reached: {one_line(str(error))}") from error
        if response.status != 200:
            raise EngineFailure(f"{url}: HTTP {response.status}: {error_message(body)}")
        try:
            card = msgspec.json.decode(body, type=_ModelList).data[0]
        except (msgspec.DecodeError, LookupError, RecursionError) as error:
            raise EngineFailure(f"{url} names no model ({error}); name one with --model") from error
        return card.id, card.root or card.id


def count_tokens(load: Run, tokenizer: Tokenizer) -> None:
    """Fill in `output_tokens` of the outcomes whose server reported none, by tokenizing their text."""
    for outcome in load.outcomes:
        if outcome.ok and not outcome.output_tokens:
            text = outcome.other_text + outcome.text
            outcome.output_tokens = len(tokenizer.encode(text, add_special_tokens=False))


def print_errors(load: Run) -> None:
    """Print the errors of failed requests on stderr, each once."""
    errors = list(dict.fromkeys(outcome.error for outcome in load.outcomes if not outcome.ok))
    for error in errors[:MAX_ERRORS_SHOWN]:
        print(f"quire: a request failed: {error}", file=sys.stderr)
    if len(errors) > MAX_ERRORS_SHOWN:
        print(f"quire: and {len(errors) - MAX_ERRORS_SHOWN} other errors", file=sys.stderr)


def _ramp(options: ServeOptions) -> Ramp | None:
    kind, first, last = options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps
    return None if kind is None or first is None or last is None else Ramp(kind, first, last)


def _events(load: Run, milestones: list[tuple[int, float]]) -> list[dict[str, Any]]:
    return [{"rps": rate, "timestamp": (load.began + timedelta(seconds=at)).isoformat()} for rate, at in milestones]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
