"""Declares the flags of `quire bench`. Those that `vllm bench` has too have its names and defaults.

Values with a structure (goals, percentiles, headers, ...) are text here; `values.py` parses them. The help of a flag
that only Quire has says so.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.errors import ConfigError

Dataset = Literal["random", "prefix_repetition", "long-tail", "sharegpt", "custom"]
Positive = Annotated[int, Meta(ge=1)]

MIN_REQUEST_RATE = 1 / 86400
"""Requests a second: one a day."""

LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """Options for the prompts and output lengths."""

    seed: Annotated[
        int, Meta(ge=0, description="Seed of all random choices: the same seed gives the same requests.")
    ] = 0
    num_prompts: Annotated[int, Meta(ge=1, description="Number of requests to send.")] = 1000
    dataset_name: Annotated[
        Dataset,
        Meta(
            description="Source of the prompts: random tokens, random tokens after shared prefixes, random tokens with "
            "a long tail of output lengths (Quire's own), or a file (sharegpt, custom)."
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None,
        Meta(description="File of sharegpt (its JSON) or custom (JSON lines with prompt and output_tokens)."),
    ] = None
    input_len: Annotated[
        Positive | None, Meta(description="Prompt tokens; overrides --random-input-len and --long-tail-input-len.")
    ] = None
    output_len: Annotated[
        Positive | None, Meta(description="Output tokens; overrides the output length of every dataset.")
    ] = None
    random_input_len: Annotated[int, Meta(ge=0, description="Prompt tokens after the shared prefix.")] = 1024
    random_output_len: Annotated[int, Meta(ge=1, description="Output tokens.")] = 128
    random_range_ratio: Annotated[
        str,
        Meta(
            description="Lengths are drawn evenly between (1 - ratio) and (1 + ratio) times the configured ones; a "
            'number from 0 to below 1, or {"input": number, "output": number}.'
        ),
    ] = "0.0"
    random_prefix_len: Annotated[int, Meta(ge=0, description="Tokens of the prefix of all prompts.")] = 0
    prefix_repetition_prefix_len: Annotated[int, Meta(ge=0, description="Tokens of each prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, Meta(ge=1, description="Tokens after the prefix.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, Meta(ge=1, description="Number of different prefixes.")] = 10
    prefix_repetition_output_len: Annotated[int, Meta(ge=1, description="Output tokens.")] = 128
    long_tail_input_len: Annotated[int, Meta(ge=1, description="Prompt tokens.")] = 128
    long_tail_output_mean: Annotated[float, Meta(gt=0, description="Mean number of output tokens.")] = 104.0
    long_tail_output_min: Annotated[int, Meta(ge=1, description="Fewest output tokens.")] = 8
    long_tail_output_max: Annotated[int, Meta(ge=1, description="Most output tokens.")] = 474
    sharegpt_output_len: Annotated[
        Positive | None, Meta(description="Output tokens; unset: as many as the answer in the file has.")
    ] = None
    custom_output_len: Annotated[
        int, Meta(ge=-1, description="Output tokens; -1: the output_tokens of each line of the file.")
    ] = 256
    skip_chat_template: Annotated[
        bool, Meta(description="Send the prompts of a custom file as they are, without the chat template.")
    ] = False
    disable_shuffle: Annotated[
        bool, Meta(description="Do not shuffle the prompts of a file or of prefix_repetition.")
    ] = False
    no_oversample: Annotated[
        bool, Meta(description="Send fewer requests rather than repeat the prompts of a file.")
    ] = False


class ServeOptions(WorkloadOptions, frozen=True, kw_only=True):
    """Options of `quire bench serve`."""

    backend: Annotated[
        Literal["openai", "vllm", "openai-chat"],
        Meta(description="API to use: completions (openai, vllm) or chat completions (openai-chat)."),
    ] = "openai"
    base_url: Annotated[str | None, Meta(description="Address of the server, instead of --host and --port.")] = None
    host: Annotated[str, Meta(description="Host of the server.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the server.")] = 8000
    endpoint: Annotated[
        str | None, Meta(description="Path of the API; unset: /v1/completions or /v1/chat/completions.")
    ] = None
    header: Annotated[list[str], Meta(description="KEY=VALUE, sent with each request.")] = []
    insecure: Annotated[bool, Meta(description="Do not verify the server's TLS certificate.")] = False
    model: Annotated[str | None, Meta(description="Model to request; unset: the first one that the server lists.")] = (
        None
    )
    served_model_name: Annotated[
        str | None, Meta(description="Name of the model in requests, if it is not --model.")
    ] = None
    tokenizer: Annotated[
        str | None, Meta(description="Folder or Hugging Face name of the tokenizer; unset: the model's.")
    ] = None
    text_prompts: Annotated[
        bool,
        Meta(description="Send random prompts to /v1/completions as text, not as token ids (Quire's own flag)."),
    ] = False
    request_rate: Annotated[float, Meta(ge=MIN_REQUEST_RATE, description="Requests a second; inf: all at once.")] = (
        math.inf
    )
    burstiness: Annotated[
        float,
        Meta(
            gt=0,
            description="Shape of the gamma distribution of the times between requests; 1: a Poisson process; less: "
            "bursts; more: steadier arrivals.",
        ),
    ] = 1.0
    max_concurrency: Annotated[
        list[Positive] | None,
        Meta(description="Requests that run at the same time; with several numbers, one run for each."),
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        Meta(description="How the request rate grows from --ramp-up-start-rps to --ramp-up-end-rps."),
    ] = None
    ramp_up_start_rps: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Request rate at the first request.")
    ] = None
    ramp_up_end_rps: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Request rate at the last request.")
    ] = None
    num_warmups: Annotated[int, Meta(ge=0, description="Warm-up requests before the measured ones.")] = 0
    ready_check_timeout_sec: Annotated[
        int, Meta(ge=0, description="Seconds to wait until the server answers a first request; 0: do not wait.")
    ] = 0
    timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a token after which a request fails, time in the server's queue included "
            "(Quire's own flag).",
        ),
    ] = 3600.0
    ignore_eos: Annotated[
        bool,
        Meta(
            description="Generate the full length even if the answer ends earlier; always set for random and long-tail."
        ),
    ] = False
    logprobs: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Number of log-probabilities to request for each token.")
    ] = None
    temperature: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    top_p: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    top_k: Annotated[int | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    min_p: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    presence_penalty: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    repetition_penalty: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    extra_body: Annotated[str | None, Meta(description="JSON object whose fields are added to each request.")] = None
    request_id_prefix: Annotated[
        str | None, Meta(description="Prefix of each request's X-Request-Id; unset: bench- and the time.")
    ] = None
    percentile_metrics: Annotated[
        str, Meta(description=f"Latencies to report, separated by commas: {', '.join(LATENCIES)}.")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, Meta(description="Percentiles to report, separated by commas.")] = "99"
    goodput: Annotated[
        list[str],
        Meta(description="NAME:MILLISECONDS (ttft, tpot, e2el): report the rate of requests that meet every goal."),
    ] = []
    label: Annotated[str | None, Meta(description="Label in the result file and in its name; unset: --backend.")] = None
    metadata: Annotated[list[str], Meta(description="KEY=VALUE, written into the result file.")] = []
    save_result: Annotated[bool, Meta(description="Write the result to a JSON file.")] = False
    save_detailed: Annotated[bool, Meta(description="Write the figures of every request to the result file too.")] = (
        False
    )
    append_result: Annotated[bool, Meta(description="Append the result to the file, as one line of JSON.")] = False
    result_dir: Annotated[str | None, Meta(description="Folder of the result file; unset: the current one.")] = None
    result_filename: Annotated[
        str | None,
        Meta(description="Name of the result file; unset: made from label, rate, concurrency, model and time."),
    ] = None
    plot: Annotated[str | None, Meta(description="File for a chart, .png or .svg (Quire's own flag).")] = None
    disable_tqdm: Annotated[bool, Meta(description="Show no progress bar.")] = False

    def __post_init__(self) -> None:
        if self.ramp_up_strategy is None and (self.ramp_up_start_rps, self.ramp_up_end_rps) != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        if self.ramp_up_strategy is not None:
            self._check_ramp()
        if self.plot is not None and not self.plot.endswith((".png", ".svg")):
            raise ConfigError(f"--plot {self.plot}: the name must end with .png or .svg")
        if self.save_detailed and not (self.save_result or self.append_result):
            raise ConfigError("--save-detailed needs --save-result or --append-result")
        if len(self.max_concurrency or ()) > 1 and self.result_filename and not self.append_result:
            raise ConfigError("--result-filename for several concurrencies needs --append-result")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"--endpoint {self.endpoint}: must begin with /")

    def _check_ramp(self) -> None:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if not math.isinf(self.request_rate):
            raise ConfigError("--ramp-up-strategy sets the rate, so --request-rate must not be given")
        if start is None or end is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if start > end:
            raise ConfigError(f"--ramp-up-start-rps {start} must be at most --ramp-up-end-rps {end}")
        if start == 0 and self.ramp_up_strategy == "exponential":
            raise ConfigError("an exponential ramp cannot begin at --ramp-up-start-rps 0")


class ThroughputOptions(WorkloadOptions, frozen=True, kw_only=True):
    """Options of `quire bench throughput`."""

    tokenizer: Annotated[
        str | None, Meta(description="Folder or Hugging Face name of the tokenizer; unset: the model's.")
    ] = None
    n: Annotated[int, Meta(ge=1, description="Samples of each prompt.")] = 1
    num_warmups: Annotated[int, Meta(ge=0, description="Warm-up prompts before the measured ones.")] = 0
    output_json: Annotated[str | None, Meta(description="File for the result.")] = None
    disable_tqdm: Annotated[bool, Meta(description="Show no progress bar (Quire's own flag).")] = False


class LatencyOptions(Struct, frozen=True, kw_only=True):
    """Options of `quire bench latency`."""

    seed: Annotated[int, Meta(ge=0, description="Seed of the prompts and of sampling.")] = 0
    input_len: Annotated[int, Meta(ge=1, description="Tokens of each prompt.")] = 32
    output_len: Annotated[int, Meta(ge=1, description="Output tokens of each sample.")] = 128
    batch_size: Annotated[int, Meta(ge=1, description="Prompts in the batch.")] = 8
    n: Annotated[int, Meta(ge=1, description="Samples of each prompt.")] = 1
    num_iters_warmup: Annotated[int, Meta(ge=0, description="Warm-up runs before the measured ones.")] = 10
    num_iters: Annotated[int, Meta(ge=1, description="Measured runs.")] = 30
    output_json: Annotated[str | None, Meta(description="File for the result.")] = None
