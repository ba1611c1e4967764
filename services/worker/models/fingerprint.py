"""`fingerprint`: identifies everything that decides which tokens a worker computes.

That is weights, types, device, torch version, instruction set, and how many ranks share the model. Weights are
identified by the sizes of their files and by samples of their content, since reading gigabytes at each start would take
too long.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.load import version
from services.worker.checkpoint.model_folder import ModelFolder
from services.worker.checkpoint.quantization_config import SETTINGS_FILES
from services.worker.models.precision import Precision
from services.worker.parallel_config import ONE_RANK, ParallelConfig

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(
    weights: str,
    precision: Precision,
    device: torch.device,
    parallel: ParallelConfig = ONE_RANK,
    *,
    code: str = "",
    batch_invariant: bool = False,
) -> str:
    """Return 16 hexadecimal digits for the weights whose `weights_digest` is `weights`.

    `code` names the modelling code if it is not Quire's. `batch_invariant` is the setting of that name.
    """
    digest = hashlib.sha256(weights.encode())
    # The number of threads is left out, since it does not change a row's bits.
    cuda = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()
    kernels = version(device, batch_invariant=batch_invariant)
    if parallel.world_size > 1:  # the order of sums follows from it
        digest.update(f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size} ranks".encode())
    digest.update(f"{tuple(precision)} {device.type} {machine} {kernels} {torch.__version__}{code}".encode())
    return digest.hexdigest()[:16]


def weights_digest(folder: ModelFolder, weights: Sequence[Path]) -> str:
    """Return 16 hexadecimal digits that identify the content of a model's files.

    They do not depend on the path of the folder or on the age of its files.
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
        for sample in range(_NUM_SAMPLES):
            file.seek(size * sample // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
