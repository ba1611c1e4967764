"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Each is done at every engine, and answered when all have answered. Paths are folders on the workers' hosts.
"""

from aiohttp import web

from services.gateway.api_requests import LoadAdapterRequest, UnloadAdapterRequest
from services.gateway.body import read
from services.gateway.errors import UnknownModel
from services.gateway.gateway import GATEWAY
from shared.errors import InvalidRequest, brief
from shared.protocol import MAX_SHORT_TEXT


async def load_lora_adapter(http: web.Request) -> web.Response:
    """Load an adapter at every engine, which requests can name as their model then. Answer with a line of text."""
    gateway = http.app[GATEWAY]
    request = await read(http, LoadAdapterRequest)
    name = _checked(request.lora_name, "lora_name")
    path = _checked(request.lora_path, "lora_path")
    if request.is_3d_lora_weight:
        raise InvalidRequest("is_3d_lora_weight is not supported", "is_3d_lora_weight")
    if name in gateway.model.names:
        raise InvalidRequest(f"{brief(name)} is a name of the model itself", "lora_name")
    await gateway.backend.add_adapter(name, path, replaces=request.load_inplace is True)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(http: web.Request) -> web.Response:
    """Let no new request name an adapter, at every engine. Those that run go on. Answer with a line of text."""
    gateway = http.app[GATEWAY]
    name = _checked((await read(http, UnloadAdapterRequest)).lora_name, "lora_name")
    if name not in gateway.backend.adapters:
        raise UnknownModel(f"there is no adapter {brief(name)}", "lora_name")
    await gateway.backend.remove_adapter(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _checked(text: str, field: str) -> str:
    """Return a name or path. Raise `InvalidRequest` if no message can carry it: an engine would give the gateway up."""
    if not 1 <= len(text) <= MAX_SHORT_TEXT:
        raise InvalidRequest(f"{field} must be a text of 1 to {MAX_SHORT_TEXT} characters, got {brief(text)}", field)
    return text
