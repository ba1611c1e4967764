"""`fingerprint`: a short name of all that makes two workers compute the same tokens.

That is the same weights, types, kind of device, library and instruction set. Weights are known by their files' sizes
and by samples of their content: reading gigabytes at each start would cost more than it proves.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.cpu import extension
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.quantization_config import SETTINGS_FILES
from services.worker.models.precision import Precision

_SAMPLES, _SAMPLE = 64, 4096  # how many, and how many bytes each


def fingerprint(weights: str, precision: Precision, device: torch.device, *, code: str = "") -> str:
    """Return 16 hexadecimal digits for the weights whose `weights_digest` is `weights`.

    `code` names the modelling code, where it is not ours.
    """
    digest = hashlib.sha256(weights.encode())
    # Not the number of threads: it doesn't change a row's bits.
    cuda = device.type == "cuda"
    machine = (
        torch.cuda.get_device_name(device) if cuda else f"{torch.backends.cpu.get_cpu_capability()} {extension.load()}"
    )
    digest.update(f"{tuple(precision)} {device.type} {machine} {torch.__version__}{code}".encode())
    return digest.hexdigest()[:16]


def weights_digest(folder: ModelFolder, weights: Sequence[Path]) -> str:
    """Return 16 hexadecimal digits of what a model's files say, however it is computed.

    They do not depend on where the folder is or how old its files are.
    """
    digest = hashlib.sha256(folder.settings["config.json"])
    for name in SETTINGS_FILES:  # they may change what the weights mean
        digest.update(folder.settings.get(name, b""))
    for path in weights:
        _add_file(digest, path)
    return digest.hexdigest()[:16]


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE))
