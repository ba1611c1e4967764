"""What the flags say that are more than a number or a word. Each error names its flag."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.bench.options import LATENCIES, ServeOptions, WorkloadOptions
from shared.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")

NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Of a header, by RFC 9110."""

FRAMING = ("content-length", "transfer-encoding")
"""Headers that follow from the request's body."""


def goals(options: ServeOptions) -> dict[str, float]:
    """Seconds by name of the latency that must not take longer. Raises `ConfigError`."""
    found: dict[str, float] = {}
    for item in options.goodput:
        name, _, value = item.partition(":")
        if name not in GOALS:
            raise ConfigError(f"--goodput {item}: must be NAME:MILLISECONDS, the name one of {', '.join(GOALS)}")
        found[name] = _number(f"--goodput {item}", value, 0.0, math.inf) / 1000
    return found


def percentiles(options: ServeOptions) -> list[float]:
    """The percentiles to report. Raises `ConfigError`."""
    flag = f"--metric-percentiles {options.metric_percentiles}"
    return [_number(flag, item, 0.0, 100.0) for item in options.metric_percentiles.split(",")]


def latencies(options: ServeOptions) -> list[str]:
    """Names of the latencies to report. Raises `ConfigError`."""
    names = [name.strip() for name in options.percentile_metrics.split(",")]
    for name in names:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile-metrics {name}: must be one of {', '.join(LATENCIES)}")
    return names


def pairs(flag: str, items: Sequence[str]) -> dict[str, str]:
    """What KEY=VALUE items say. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {item}: must be KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def headers(options: ServeOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Those of every request: the key of `OPENAI_API_KEY` and what --header says. Raises `ConfigError`."""
    found = {}
    if key := environment.get("OPENAI_API_KEY"):
        _check_header("OPENAI_API_KEY", key)  # which is not shown
        found["Authorization"] = f"Bearer {key}"
    for name, value in pairs("--header", options.header).items():
        if not NAME.fullmatch(name) or name.lower() in FRAMING:
            raise ConfigError(f"--header {name!r}: no header that can be set")
        _check_header(f"--header {name}", value)
        found[name] = value
    _check_header("--request-id-prefix", options.request_id_prefix or "")
    return found


def range_ratios(options: WorkloadOptions) -> tuple[float, float]:
    """Of input and output lengths. Raises `ConfigError`."""
    flag = f"--random-range-ratio {options.random_range_ratio}"
    try:
        given: Any = msgspec.json.decode(options.random_range_ratio)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag}: neither a number nor a JSON object") from error
    if isinstance(given, Mapping) and set(given) != {"input", "output"}:
        raise ConfigError(f"{flag}: must have exactly the keys input and output")
    both = (given["input"], given["output"]) if isinstance(given, Mapping) else (given, given)
    ratios = tuple(_number(flag, value, 0.0, 1.0) for value in both)
    if 1.0 in ratios:
        raise ConfigError(f"{flag}: must be below 1")
    return ratios[0], ratios[1]


def body(options: ServeOptions, *, ignore_eos: bool) -> dict[str, Any]:
    """The fields that each request has besides its prompt. Raises `ConfigError`."""
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    found = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.logprobs is not None:
        found |= _logprobs(options.logprobs, options.backend == "openai-chat")
    if ignore_eos:
        found["ignore_eos"] = True
    if options.extra_body is not None:
        try:
            found |= msgspec.json.decode(options.extra_body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--extra-body: not a JSON object: {error}") from error
    return found


def _logprobs(count: int, chat: bool) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}


def _check_header(source: str, value: str) -> None:
    if not value.replace("\t", " ").isprintable():
        raise ConfigError(f"{source}: has a line end or another character that no header can have")


def _number(flag: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: {value!r} is not a number") from error
    if not least <= number <= most:
        raise ConfigError(f"{flag}: {value} must be between {least:g} and {most:g}")
    return number
