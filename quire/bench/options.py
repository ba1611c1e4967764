"""The flags of `quire bench`. Names and defaults are those of `vllm bench` where they mean the same.

Structured values (goals, percentiles, headers, ...) are text here; `values.py` parses them. Flags that only Quire has
say so.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.errors import ConfigError

Dataset = Literal["random", "prefix_repetition", "long-tail", "sharegpt", "custom"]
Positive = Annotated[int, Meta(ge=1)]

SLOWEST = 1 / 86400
"""Lowest rate in requests a second: one a day."""

LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")


class WorkloadOptions(Struct, frozen=True, kw_only=True):
    """Options for the prompts and output lengths."""

    seed: Annotated[int, Meta(ge=0, description="Seed of all random choices, so of the requests.")] = 0
    num_prompts: Annotated[int, Meta(ge=1, description="Requests to send.")] = 1000
    dataset_name: Annotated[
        Dataset,
        Meta(
            description="Where prompts come from: random tokens, random with shared beginnings, random with a long "
            "tail of output lengths (Quire's own), or a file."
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None, Meta(description="The file: ShareGPT's JSON, or JSON lines with prompt and output_tokens.")
    ] = None
    input_len: Annotated[Positive | None, Meta(description="Prompt tokens, for random and long-tail.")] = None
    output_len: Annotated[Positive | None, Meta(description="Output tokens, for every dataset.")] = None
    random_input_len: Annotated[int, Meta(ge=0, description="Prompt tokens behind the shared prefix.")] = 1024
    random_output_len: Annotated[int, Meta(ge=1, description="Output tokens.")] = 128
    random_range_ratio: Annotated[
        str,
        Meta(
            description="Lengths are drawn evenly from (1 - ratio) to (1 + ratio) times the given ones; one number "
            'from 0 to below 1, or {"input": number, "output": number}.'
        ),
    ] = "0.0"
    random_prefix_len: Annotated[int, Meta(ge=0, description="Tokens with which every prompt begins.")] = 0
    prefix_repetition_prefix_len: Annotated[int, Meta(ge=0, description="Tokens of each shared prefix.")] = 256
    prefix_repetition_suffix_len: Annotated[int, Meta(ge=1, description="Tokens behind the prefix.")] = 256
    prefix_repetition_num_prefixes: Annotated[int, Meta(ge=1, description="Different prefixes.")] = 10
    prefix_repetition_output_len: Annotated[int, Meta(ge=1, description="Output tokens.")] = 128
    long_tail_input_len: Annotated[int, Meta(ge=1, description="Prompt tokens.")] = 128
    long_tail_output_mean: Annotated[float, Meta(gt=0, description="Mean of the output tokens.")] = 104.0
    long_tail_output_min: Annotated[int, Meta(ge=1, description="Fewest output tokens.")] = 8
    long_tail_output_max: Annotated[int, Meta(ge=1, description="Most output tokens.")] = 474
    sharegpt_output_len: Annotated[
        Positive | None, Meta(description="Output tokens; unset: as many as the file's answer has.")
    ] = None
    custom_output_len: Annotated[
        int, Meta(ge=-1, description="Output tokens; -1: the output_tokens of each line of the file.")
    ] = 256
    skip_chat_template: Annotated[
        bool, Meta(description="Send the prompts of a custom file as they are, not as chats of one message.")
    ] = False
    disable_shuffle: Annotated[bool, Meta(description="Keep the order of the file, or of the prefixes.")] = False
    no_oversample: Annotated[bool, Meta(description="Send fewer requests rather than a file's prompts twice.")] = False


class ServeOptions(WorkloadOptions, frozen=True, kw_only=True):
    """Options of `quire bench serve`."""

    backend: Annotated[
        Literal["openai", "vllm", "openai-chat"],
        Meta(description="API to speak: completions (openai, vllm) or chat completions."),
    ] = "openai"
    base_url: Annotated[str | None, Meta(description="Address of the server, instead of --host and --port.")] = None
    host: Annotated[str, Meta(description="Host of the server.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the server.")] = 8000
    endpoint: Annotated[
        str | None, Meta(description="Path of the API; unset: /v1/completions or /v1/chat/completions.")
    ] = None
    header: Annotated[list[str], Meta(description="KEY=VALUE, sent with each request.")] = []
    insecure: Annotated[bool, Meta(description="Accept any certificate.")] = False
    model: Annotated[str | None, Meta(description="Model to request; unset: the first that the server lists.")] = None
    served_model_name: Annotated[
        str | None, Meta(description="Its name in requests, where --model is a folder or a Hugging Face name.")
    ] = None
    tokenizer: Annotated[str | None, Meta(description="Folder or name of the tokenizer; unset: the model's.")] = None
    text_prompts: Annotated[
        bool,
        Meta(description="Send random prompts as text, not as token ids, to /v1/completions too (Quire's own flag)."),
    ] = False
    request_rate: Annotated[float, Meta(ge=SLOWEST, description="Requests a second; inf: all at once.")] = math.inf
    burstiness: Annotated[
        float,
        Meta(
            gt=0,
            description="Shape of the gamma distribution of the times between requests; 1 is a Poisson process, less "
            "comes in bursts, more is steadier.",
        ),
    ] = 1.0
    max_concurrency: Annotated[
        list[Positive] | None,
        Meta(description="Requests that run at the same time; with several numbers, one run for each."),
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, Meta(description="How the rate grows from its start to its end.")
    ] = None
    ramp_up_start_rps: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Rate of the first.")] = None
    ramp_up_end_rps: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Rate of the last.")] = None
    num_warmups: Annotated[int, Meta(ge=0, description="Requests before the measured ones.")] = 0
    ready_check_timeout_sec: Annotated[
        int, Meta(ge=0, description="Seconds to try until the server answers a first request; 0: do not try.")
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
        Meta(description="Generate to the full length even if the answer ends earlier; always so for random."),
    ] = False
    logprobs: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Log-probabilities to ask for.")] = None
    temperature: Annotated[float | None, Meta(description="Sampling parameter; unset: the server's.")] = None
    top_p: Annotated[float | None, Meta(description="Sampling parameter.")] = None
    top_k: Annotated[int | None, Meta(description="Sampling parameter.")] = None
    min_p: Annotated[float | None, Meta(description="Sampling parameter.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="Sampling parameter.")] = None
    presence_penalty: Annotated[float | None, Meta(description="Sampling parameter.")] = None
    repetition_penalty: Annotated[float | None, Meta(description="Sampling parameter.")] = None
    extra_body: Annotated[str | None, Meta(description="JSON object whose fields go into each request.")] = None
    request_id_prefix: Annotated[
        str | None, Meta(description="Prefix of each request's X-Request-Id; unset: random for each run.")
    ] = None
    percentile_metrics: Annotated[
        str, Meta(description=f"Latencies to report, with commas between: {', '.join(LATENCIES)}.")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, Meta(description="Percentiles to report, with commas between.")] = "99"
    goodput: Annotated[
        list[str], Meta(description="NAME:MILLISECONDS (ttft, tpot, e2el): count the requests that meet all.")
    ] = []
    label: Annotated[str | None, Meta(description="Label in the result's file and file name; unset: --backend.")] = None
    metadata: Annotated[list[str], Meta(description="KEY=VALUE, written into the result file.")] = []
    save_result: Annotated[bool, Meta(description="Write a JSON file.")] = False
    save_detailed: Annotated[bool, Meta(description="Write every request's figures into it too.")] = False
    append_result: Annotated[bool, Meta(description="Append to the file, on a line of its own.")] = False
    result_dir: Annotated[str | None, Meta(description="Folder of the file; unset: the current one.")] = None
    result_filename: Annotated[str | None, Meta(description="Name of the file; unset: made of what was run.")] = None
    plot: Annotated[str | None, Meta(description="Draw a chart into this file, .png or .svg (Quire's own flag).")] = (
        None
    )
    disable_tqdm: Annotated[bool, Meta(description="No progress bar.")] = False

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

    tokenizer: Annotated[str | None, Meta(description="Folder or name of the tokenizer; unset: the model's.")] = None
    n: Annotated[int, Meta(ge=1, description="Samples of each prompt.")] = 1
    num_warmups: Annotated[int, Meta(ge=0, description="Prompts before the measured ones.")] = 0
    output_json: Annotated[str | None, Meta(description="File for the result.")] = None
    disable_tqdm: Annotated[bool, Meta(description="No progress bar (Quire's own flag).")] = False


class LatencyOptions(Struct, frozen=True, kw_only=True):
    """Options of `quire bench latency`."""

    seed: Annotated[int, Meta(ge=0, description="Seed of the prompts and of sampling.")] = 0
    input_len: Annotated[int, Meta(ge=1, description="Tokens of each prompt.")] = 32
    output_len: Annotated[int, Meta(ge=1, description="Output tokens of each sample.")] = 128
    batch_size: Annotated[int, Meta(ge=1, description="Prompts in the batch.")] = 8
    n: Annotated[int, Meta(ge=1, description="Samples of each prompt.")] = 1
    num_iters_warmup: Annotated[int, Meta(ge=0, description="Runs before the measured ones.")] = 10
    num_iters: Annotated[int, Meta(ge=1, description="Measured runs.")] = 30
    output_json: Annotated[str | None, Meta(description="File for the result.")] = None
