"""The gateway's settings. Their table in the documentation and `--help` are made from this struct."""

from typing import Annotated

from msgspec import Meta, field

from shared.config import ModelConfig

Name = Annotated[str, Meta(min_length=1)]


class GatewayConfig(ModelConfig, frozen=True, kw_only=True):
    """Settings of one gateway process. Any number of them may stand before the same engines."""

    engines: Annotated[list[Name], Meta(description="Address of an engine's scheduler, or several.")] = field(
        default_factory=lambda: ["tcp://127.0.0.1:5557"]
    )
    host: Annotated[str, Meta(description="Address to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any that is free.")] = 8000
    reuse_port: Annotated[
        bool, Meta(description="Let several gateways listen on one port; the system spreads connections over them.")
    ] = False
    served_model_name: Annotated[
        list[Name],
        Meta(description="Name of the model in the API; of several, the first stands in answers; unset: --model."),
    ] = []
    api_key: Annotated[
        list[Name], Meta(description="Key that requests must carry as a bearer token; of several, any.")
    ] = []
    tokenizer: Annotated[
        str | None,
        Meta(
            description="Folder or Hugging Face name to take tokenizer and chat template from, instead of the model's."
        ),
    ] = None
    chat_template: Annotated[str | None, Meta(description="File of a chat template, instead of the model's own.")] = (
        None
    )
    generation_config: Annotated[
        Name,
        Meta(description="Folder whose generation_config.json gives sampling defaults; auto: the model's; vllm: none."),
    ] = "auto"
    max_body_size: Annotated[int, Meta(ge=1, description="MiB of a request's body; longer ones get status 413.")] = 32
    keep_alive_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that an idle connection is kept open for its next request.")
    ] = 75.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that running requests have to finish after SIGTERM.")
    ] = 30.0
    supervisor: Annotated[
        int, Meta(ge=0, description="Process id of the parent that restarts this service; it ends with that one.")
    ] = 0
    supervisor_address: Annotated[
        str, Meta(description="Address at which a supervisor awaits this service's signs of life; empty: none does.")
    ] = ""
    enable_log_requests: Annotated[
        bool, Meta(description="Write a line to the log for each request, probes left out.")
    ] = False
