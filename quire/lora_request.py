"""`LoRARequest`: an adapter as callers of `LLM` name it, with vLLM's fields."""

from msgspec import Struct

from shared.errors import InvalidRequest, brief


class LoRARequest(Struct, frozen=True):
    """An adapter (LoRA): its name, an id of at least 1, and its folder in PEFT's format.

    With `load_inplace`, it takes the place of one of the same name that is loaded already.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None  # of the model that it was made for; only shown
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str) or not value:
                raise InvalidRequest(f"{name} must be a text that is not empty, got {brief(value)}", "lora_request")
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id must be a number of at least 1, got {brief(self.lora_int_id)}", "lora_request"
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
