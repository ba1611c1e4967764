"""Finds the GPUs of this machine, and gives each of its ranks one. Neither torch nor CUDA is needed."""

from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder for each GPU here."""


def list_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that workers may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(DRIVER.iterdir())] if DRIVER.exists() else []


def gpu_variables(device: str, num_ranks: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return variables for the processes of several ranks that compute on `device`: each sees a GPU of its own, if
    there are GPUs. Raise `ConfigError` if there are too few.
    """
    gpus = list_gpus(environment)
    if device == "cpu" or not gpus:
        return [{}] * num_ranks
    if num_ranks > len(gpus):
        raise ConfigError(f"each of the {num_ranks} ranks needs a GPU of its own, and there are {len(gpus)}")
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:num_ranks]]
