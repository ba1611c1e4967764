"""Declares the gateway's settings. `--help` and the table in the documentation are made from this struct."""

from typing import Annotated, Literal

from msgspec import Meta, field

from services.gateway.routing import RoutingPolicy
from shared.config import (
    MAX_SECONDS,
    AdminPort,
    DrainTimeout,
    Insecure,
    LogFormat,
    LogLevel,
    ModelConfig,
    Supervisor,
    SupervisorAddress,
    ZmqKeys,
)
from shared.params import MAX_LOGPROBS

SHARED_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which gateways of one port keep their figures, so that each shows the sum.

It is the client library's, and must be set before that is imported.
"""

Name = Annotated[str, Meta(min_length=1)]


class GatewayConfig(ModelConfig, frozen=True, kw_only=True):
    """Settings of one gateway process. Several gateways may use the same engines."""

    engines: Annotated[
        list[Name],
        Meta(
            description="Addresses of the engines' schedulers (tcp:// or ipc://), or where to find them: "
            "dns://NAME:PORT, each address of the name; file:///PATH, one address a line. Names and files are read "
            "anew every 2 seconds."
        ),
    ] = field(default_factory=lambda: ["tcp://127.0.0.1:5557"])
    engine_loss_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_SECONDS,
            description="Seconds that a request waits for an engine, at its start or after its engine was lost, before "
            "it ends with an error.",
        ),
    ] = 60.0
    routing_policy: Annotated[
        RoutingPolicy,
        Meta(
            description="How an engine is chosen for a request. cache_aware: by the part of its prompt that is cached "
            "there and by load; least_loaded: by the number of its requests; round_robin: in turn."
        ),
    ] = "cache_aware"
    zmq_keys: ZmqKeys = ""
    insecure: Insecure = False
    host: Annotated[str, Meta(description="Address to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any free port.")] = 8000
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[^/{}?#\s]+)*/?$",
            description="Path under which a proxy publishes the API; paths with and without it are served.",
        ),
    ] = ""
    uds: Annotated[str | None, Meta(description="Path of a Unix socket to listen on, instead of host and port.")] = None
    probe_uds: Annotated[
        str | None,
        Meta(description="Path of a second Unix socket, by which a supervisor reaches one gateway of several."),
    ] = None
    reuse_port: Annotated[
        bool,
        Meta(description="Let several gateways listen on one port; the kernel distributes connections among them."),
    ] = False
    served_model_name: Annotated[
        list[Name],
        Meta(description="Names of the model in the API; responses have the first. Unset: --model."),
    ] = []
    api_key: Annotated[
        list[Name],
        Meta(description="API keys; a request must have one of them as its bearer token."),
    ] = []
    allowed_origins: Annotated[
        list[Name],
        Meta(description="Origins of web pages that may use the API from a browser; *: all; unset: none."),
    ] = []
    allowed_methods: Annotated[
        list[Name], Meta(description="Methods that web pages of other origins may use; *: all.")
    ] = field(default_factory=lambda: ["*"])
    allowed_headers: Annotated[
        list[Name], Meta(description="Headers that web pages of other origins may send; *: all.")
    ] = field(default_factory=lambda: ["*"])
    allow_credentials: Annotated[
        bool, Meta(description="Let web pages of other origins send credentials, such as cookies.")
    ] = False
    tokenizer: Annotated[
        str | None,
        Meta(description="Folder or Hugging Face name of a tokenizer and chat template to use instead of the model's."),
    ] = None
    tokenizer_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of the tokenizer that --tokenizer names.")
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(description="File with a chat template to use instead of the model's, or the template itself."),
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="Format of a message's content for the chat template: a string, or a list of parts (openai); "
            "auto: the one that the template reads."
        ),
    ] = "auto"
    special_tokens_in_messages: Annotated[
        Literal["tokens", "text"],
        Meta(
            description="What the names of special tokens in chat messages become, except in those of the assistant: "
            "tokens, as in vLLM; text: a message cannot end its turn or begin another one."
        ),
    ] = "tokens"
    default_chat_template_kwargs: Annotated[
        str, Meta(description="JSON object of variables for the chat template; a request's own override them.")
    ] = ""
    trust_request_chat_template: Annotated[
        bool,
        Meta(description="Let a request bring its own chat template, which runs in a process with limits."),
    ] = False
    tool_call_parser: Annotated[
        Name,
        Meta(
            description="Parser of the tool calls in outputs; auto: the one whose markers are in the chat template; "
            "none: calls stay text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Name,
        Meta(
            description="Parser of the reasoning in outputs; auto: the one whose markers are in the chat template; "
            "none: reasoning stays part of the content."
        ),
    ] = "auto"
    exclude_tools_when_tool_choice_none: Annotated[
        bool, Meta(description="Do not show a request's tools to the model if its tool_choice is none.")
    ] = False
    override_generation_config: Annotated[
        str, Meta(description="JSON object of sampling defaults that override generation_config.json.")
    ] = ""
    generation_config: Annotated[
        Name,
        Meta(description="Folder whose generation_config.json gives sampling defaults; auto: the model's; vllm: none."),
    ] = "auto"
    max_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_LOGPROBS,
            description="Maximum number of log-probabilities that a request may ask for, per token.",
        ),
    ] = MAX_LOGPROBS
    max_body_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum size of a request's body in MiB; a larger one gets status 413. Unset: 4 MiB and 32 "
            "bytes for each token of the context, at most 16 MiB. Larger bodies can delay other requests' streams."
        ),
    ] = None
    strict_fields: Annotated[
        bool, Meta(description="Refuse a request with a field that this server does not know, instead of ignoring it.")
    ] = False
    enable_reset_prefix_cache: Annotated[
        bool, Meta(description="Serve POST /reset_prefix_cache, which has the engines forget their cached blocks.")
    ] = False
    enable_lora_runtime_updates: Annotated[
        bool,
        Meta(
            description="Serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter, by which clients have the "
            "engines load adapters from folders of their hosts."
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="Show the tokenizer's configuration and the chat template at /tokenizer_info.")
    ] = False
    disable_fastapi_docs: Annotated[
        bool, Meta(description="Serve neither /openapi.json, which describes the API, nor /docs, which shows it.")
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Meta(
            description="Write the usage in every chunk of a stream, as if each request asked for it in stream_options."
        ),
    ] = False
    stream_interval: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens of a chunk of a stream. The first one comes at once; a request's stream_interval "
            "overrides it.",
        ),
    ] = 1
    sse_keep_alive_interval: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_SECONDS,
            description="Seconds of silence, at most doubled, after which a stream gets a comment; 0: never.",
        ),
    ] = 15.0
    keep_alive_timeout: Annotated[
        float,
        Meta(ge=0, le=MAX_SECONDS, description="Seconds that an idle connection is kept open for its next request."),
    ] = 75.0
    shutdown_delay: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_SECONDS,
            description="Seconds for which a gateway that drains still takes new requests, while /health is 503 "
            "already, so that load balancers can notice.",
        ),
    ] = 0.0
    drain_timeout: DrainTimeout = 30.0
    admin_port: AdminPort = 0
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    supervisor: Supervisor = 0
    supervisor_address: SupervisorAddress = ""
    enable_log_requests: Annotated[
        bool, Meta(description="Write a line to the log for each request except probes.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP; "
            "without a path, it gets them at /v1/traces. Needs the extra `tracing`. Empty: "
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or no traces."
        ),
    ] = ""
