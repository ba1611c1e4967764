"""Parses the flags whose values have a structure. Each error names its flag."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.bench.options import LATENCIES, ServeOptions, WorkloadOptions
from shared.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name in RFC 9110."""

BODY_HEADERS = ("content-length", "transfer-encoding")
"""Headers whose values depend on the request's body."""


def goals(options: ServeOptions) -> dict[str, float]:
    """Return the goals: seconds by name of the latency. Raise `ConfigError`."""
    parsed: dict[str, float] = {}
    for item in options.goodput:
        name, _, value = item.partition(":")
        if name not in GOALS:
            raise ConfigError(f"--goodput {item}: must be NAME:MILLISECONDS, the name one of {', '.join(GOALS)}")
        parsed[name] = _number(f"--goodput {item}", value, 0.0, math.inf) / 1000
    return parsed


def percentiles(options: ServeOptions) -> list[float]:
    """Return the percentiles to report. Raise `ConfigError`."""
    flag = f"--metric-percentiles {options.metric_percentiles}"
    return [_number(flag, item, 0.0, 100.0) for item in options.metric_percentiles.split(",")]


def latencies(options: ServeOptions) -> list[str]:
    """Return the names of the latencies to report. Raise `ConfigError`."""
    names = [name.strip() for name in options.percentile_metrics.split(",")]
    for name in names:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile-metrics {name}: must be one of {', '.join(LATENCIES)}")
    return names


def pairs(flag: str, items: Sequence[str]) -> dict[str, str]:
    """Return KEY=VALUE items as a dictionary. Raise `ConfigError`."""
    parsed: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {item}: must be KEY=VALUE")
        parsed[key.strip()] = value.strip()
    return parsed


def headers(options: ServeOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of every request: `OPENAI_API_KEY` as a bearer token, and --header. Raise `ConfigError`."""
    parsed = {}
    if key := environment.get("OPENAI_API_KEY"):
        _check_header("OPENAI_API_KEY", key)  # the key is not shown
        parsed["Authorization"] = f"Bearer {key}"
    for name, value in pairs("--header", options.header).items():
        if not HEADER_NAME.fullmatch(name) or name.lower() in BODY_HEADERS:
            raise ConfigError(f"--header {name!r}: not a header that can be set")
        _check_header(f"--header {name}", value)
        parsed[name] = value
    _check_header("--request-id-prefix", options.request_id_prefix or "")
    return parsed


def range_ratios(options: WorkloadOptions) -> tuple[float, float]:
    """Return the ratios (0 to below 1) by which input and output lengths may deviate. Raise `ConfigError`."""
    flag = f"--random-range-ratio {options.random_range_ratio}"
    try:
        value: Any = msgspec.json.decode(options.random_range_ratio)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag}: neither a number nor a JSON object") from error
    if isinstance(value, Mapping) and set(value) != {"input", "output"}:
        raise ConfigError(f"{flag}: must have exactly the keys input and output")
    both = (value["input"], value["output"]) if isinstance(value, Mapping) else (value, value)
    ratios = tuple(_number(flag, ratio, 0.0, 1.0) for ratio in both)
    if 1.0 in ratios:
        raise ConfigError(f"{flag}: must be below 1")
    return ratios[0], ratios[1]


def body(options: ServeOptions, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the fields of each request besides its prompt. Raise `ConfigError`."""
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    parsed = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.logprobs is not None:
        parsed |= _logprobs(options.logprobs, options.backend == "openai-chat")
    if ignore_eos:
        parsed["ignore_eos"] = True
    if options.extra_body is not None:
        try:
            parsed |= msgspec.json.decode(options.extra_body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--extra-body: not a JSON object: {error}") from error
    return parsed


def _logprobs(count: int, chat: bool) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}


def _check_header(source: str, value: str) -> None:
    if not value.replace("\t", " ").isprintable():
        raise ConfigError(f"{source}: has a line end or another character that is not allowed in a header")


def _number(flag: str, value: Any, minimum: float, maximum: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: {value!r} is not a number") from error
    if not minimum <= number <= maximum:
        raise ConfigError(f"{flag}: {value} must be between {minimum:g} and {maximum:g}")
    return number
