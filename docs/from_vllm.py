"""Make the tables of docs/from-vllm.md: what of vLLM's surface Quire has, as the code says, and why it lacks the rest.

`tables` raises `ValueError` for a name of `docs.vllm_surface` that is out of date: Quire has it though a reason says
why not, or it has it no more and there is no reason.
"""

import inspect
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from types import NoneType
from typing import get_type_hints

import yaml
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from docs import vllm_surface
from quire import vllm_settings
from quire.arguments import OTHER_SETTINGS
from quire.llm import LLM
from quire.outputs import CompletionOutput, RequestOutput
from quire.request_builder import ChatOptions, PromptOptions
from quire.settings import public_knobs
from quire.vllm import METHODS, SETTINGS
from services.gateway.api_requests import ChatRequest, CompletionRequest, ResponsesRequest
from services.gateway.app import make_routes
from services.gateway.config import GatewayConfig
from services.gateway.metrics import Metrics
from services.gateway.unsupported_fields import HINTS, NEUTRAL_VALUES
from shared.params import SamplingParams
from shared.protocol import Snapshot
from shared.vllm_params import REFUSED, VllmParams

ROOT = Path(__file__).parents[1]
SWITCHES = ("enable_tokenizer_info_endpoint", "enable_reset_prefix_cache", "enable_lora_runtime_updates")
"""Settings without which some routes are not there."""

Rows = list[tuple[str, str]]


def tables() -> dict[str, str]:
    """Return the tables, by the names of their marks."""
    return {
        "flags": _table("vLLM's flags", "in Quire", _flags()),
        "LLM": _table("of vLLM's Python API", "in Quire", _python()),
        "endpoints": _table("vLLM's endpoints", "in Quire", _endpoints()),
        "fields": _table("fields of requests", "in Quire", _fields()),
        "metrics": _table("vLLM's metrics", "in Quire", _metrics()),
        "images": _table("vLLM", "Quire", _images()),
    }


def _flags() -> Rows:
    own = {knob.name for knob in public_knobs()}
    listed = set(SETTINGS) | set(vllm_settings.RENAMED)
    same = _same("flag", vllm_surface.FLAGS.split(), own, listed)
    return [
        (_code(f"--{name.replace('_', '-')}" for name in same), "the same, [with their effect](settings.md)"),
        (f"{len(listed)} other flags", "renamed, accepted without effect, or refused: [vLLM's flags](vllm_flags.md)"),
        *(
            (f"the variable `{name}`", f"read by `quire serve` as `{own}`")
            for name, own in vllm_settings.VARIABLES.items()
        ),
    ]


def _python() -> Rows:
    same = _same("method", vllm_surface.METHODS.split(), _public(LLM), set(METHODS))
    own = sorted(_public(LLM) - set(same) - {"tokenizer"})
    arguments = [*list(inspect.signature(LLM.__init__).parameters)[1:-1], "hf_token", *sorted(OTHER_SETTINGS)]
    flags = {*vllm_surface.FLAGS.split(), "seed"}
    prompts = list(PromptOptions.__annotations__)
    chats = [name for name in ChatOptions.__annotations__ if name not in prompts]
    return [
        ("arguments of `LLM`: " + _code(name for name in arguments if name in flags), "the same"),
        ("other arguments of `LLM`", "[as the flags of their names](vllm_flags.md)"),
        ("—", "Quire's own arguments: " + _code(name for name in arguments if name not in flags)),
        ("`LLM`'s methods " + _code(same), "the same"),
        *((_code(names.split()), f"missing: {reason}") for reason, names in vllm_settings.REFUSED_METHODS.items()),
        ("—", f"Quire's own methods: {_code(own)}"),
        ("arguments of `generate` and `enqueue`", _code(["prompts", "sampling_params", "use_tqdm", *prompts])),
        ("arguments of `chat` and `enqueue_chat`", "those, with `messages` for `prompts`, and " + _code(chats)),
        *_sampling(),
        *_outputs(RequestOutput, vllm_surface.REQUEST_OUTPUT_FIELDS.split()),
        *_outputs(CompletionOutput, vllm_surface.COMPLETION_OUTPUT_FIELDS.split()),
    ]


def _sampling() -> Rows:
    own = set(SamplingParams.__struct_fields__) - set(REFUSED)
    hints = set(VllmParams.__struct_fields__) - set(REFUSED) - {"best_of"}
    same = _same("field", vllm_surface.SAMPLING_FIELDS.split(), own, set(REFUSED))
    others = sorted(own - set(same))
    refused = [f"`{name}` ({reason})" for name, (_, reason) in REFUSED.items()]
    return [
        ("`SamplingParams`: " + _code(name for name in same if name not in hints), "the same"),
        ("`SamplingParams`: " + _code(sorted(hints)), "accepted; outputs are whole, so there is nothing to change"),
        ("`SamplingParams`: " + _code(others), "of older versions and of the HTTP API; `best_of` must equal `n`"),
        ("`SamplingParams`", "refused unless they ask for nothing: " + "; ".join(refused)),
    ]


def _outputs(output: type[Struct], theirs: list[str]) -> Rows:
    types = get_type_hints(output)
    _same("field", theirs, set(types), set())
    empty = [name for name in theirs if types[name] is NoneType]
    own = [name for name in types if name not in theirs]
    rest = f"; Quire's own: {_code(own)}" if own else ""
    filled = [name for name in theirs if name not in empty]
    return [(f"`{output.__name__}`: {_code(filled)}", f"the same{rest}; always None: {_code(empty)}")]


def _endpoints() -> Rows:
    default = _paths(GatewayConfig())
    switched = {
        path: switch for switch in SWITCHES for path in _paths(GatewayConfig(**{switch: True})) if path not in default
    }
    missing = {path for names in vllm_surface.MISSING_ENDPOINTS.values() for path in names.split()}
    same = _same("endpoint", vllm_surface.ENDPOINTS.split(), default | set(switched), missing)
    rows = [(_code(path for path in same if path in default), "[the same](api.md#endpoints)")]
    for switch in SWITCHES:
        paths = [path for path in same if switched.get(path) == switch]
        rows.append((_code(paths), f"with `--{switch.replace('_', '-')}`"))
    rows += [(_code(names.split()), f"missing: {why}") for why, names in vllm_surface.MISSING_ENDPOINTS.items()]
    if own := sorted((default | set(switched)) - set(same)):
        rows.append(("—", f"Quire's own: {_code(own)}"))
    return rows


def _paths(config: GatewayConfig) -> set[str]:
    return {re.sub(r":[^{}]*\}", "}", route.path) for route in make_routes(config) if route.is_shown}


def _fields() -> Rows:
    chat, completion = ChatRequest.__struct_fields__, CompletionRequest.__struct_fields__
    known = {*chat, *completion}
    return [
        (
            f"{len(chat)} fields of chats, {len(completion)} of completions, {len(ResponsesRequest.__struct_fields__)} "
            "of responses, listed in `/openapi.json`",
            "[with their effect](api.md)",
        ),
        (_code(sorted(HINTS - known)), "accepted with any value: they change no text"),
        (_code(sorted(set(NEUTRAL_VALUES) - known)), "refused unless their value asks for nothing"),
        ("other fields", "ignored, and named in the header `X-Quire-Ignored-Fields`; `--strict-fields` refuses them"),
    ]


def _metrics() -> Rows:
    patterns = {name for names in vllm_surface.MISSING_METRICS.values() for name in names.split()}
    own = exported_metrics()
    vllms = {name.removeprefix("vllm:") for name in own if name.startswith("vllm:")}
    wrong = {name for name in vllms if any(fnmatch(name, pattern) for pattern in patterns)}
    same = _same("metric", vllm_surface.METRICS.split(), vllms, wrong)
    return [
        (_code(f"vllm:{name}" for name in same), "the same"),
        *((_code(names.split()), f"missing: {reason}") for reason, names in vllm_surface.MISSING_METRICS.items()),
        ("names of older versions and of guides", _code(f"vllm:{name}" for name in sorted(vllms - set(same)))),
        ("`http_requests_total`, ...", "`quire:http_responses_total`"),
        ("—", f"{len(own) - len(vllms)} more begin with `quire:`"),
    ]


def exported_metrics() -> set[str]:
    """Return the names of the metrics of a gateway, without the `_total` of counters."""
    metrics = Metrics("model", lambda: {"0": Snapshot(max_loras=1)})
    metrics.engine("0")
    metrics.count_response("/v1/models", 200)
    families = text_string_to_metric_families(metrics.render()[0].decode())
    names = {family.name for family in families if family.name.startswith(("vllm:", "quire:"))}
    return {name for name in names if not name.endswith("_created")}  # the client library's, of each that counts


def _images() -> Rows:
    stages = re.split(r"^FROM ", (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    entrypoints = {
        stage.split()[2]: " ".join(yaml.safe_load(line[1]))
        for stage in stages
        if (line := re.search(r"^ENTRYPOINT (\[.*\])$", stage, re.MULTILINE))
    }
    compose = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docker-compose*.yml")))
    images = sorted(set(re.findall(r"image: (quire-[\w-]+)", compose)))
    (home,) = re.findall(r"HF_HOME=(\S+)", "".join(stages))
    (port,) = re.findall(r'"\$\{PORT:-(\d+)\}:\d+"', compose)
    return [
        ("the image `vllm/vllm-openai`", f"an image for each service: {_code(images)}, built from `deploy/Dockerfile`"),
        (
            "its entrypoint `vllm serve`, and flags behind the image's name",
            "; ".join(f"`{target}`: `{command}`" for target, command in entrypoints.items())
            + ". Flags are [`QUIRE_...` variables](settings.md)",
        ),
        ("its port 8000", f"{port}, of the balancer under compose and of the Service `quire` under Kubernetes"),
        ("`HF_TOKEN`, `HF_HUB_OFFLINE`", "the same"),
        ("a volume at `/root/.cache/huggingface`", f"the volume `models`, with `{home}` in it"),
        ("a local model, mounted anywhere", "`MODEL_FOLDER=./folder QUIRE_MODEL=/model`"),
        ("probes of `/health`", "the same; `/health?engines=0` is ready while the gateway takes requests"),
        ("`nvidia.com/gpu` of a Deployment", "of the StatefulSet `engine`, in `deploy/kubernetes/overlays/gpu`"),
    ]


def _same(kind: str, theirs: Iterable[str], own: set[str], missing: set[str]) -> list[str]:
    """Return those of vLLM's names that Quire has. Raise `ValueError` for one that neither or both sides claim."""
    if both := sorted(own & missing):
        raise ValueError(f"Quire has the {kind} {both[0]}, but a reason says why it has not")
    same = [name for name in theirs if name in own]
    if lost := [name for name in theirs if name not in own and name not in missing]:
        raise ValueError(f"Quire has no {kind} {lost[0]}, and no reason says why")
    return same


def _public(owner: type) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(first: str, second: str, rows: Rows) -> str:
    lines = [f"| {first} | {second} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines) + "\n"
