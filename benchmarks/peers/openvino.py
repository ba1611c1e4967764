"""OpenVINO GenAI, in process: the model exported with 8-bit weights by optimum-intel, or the GGUF file itself."""

import json
from pathlib import Path

from benchmarks.peers.environments import call, environment, log, pinned
from benchmarks.peers.launch import Launch, Place
from shared.hub.embedded import embedded_file

PACKAGE = "openvino-genai==2026.4.1.0"
EXPORTER = "optimum-intel[openvino]==2.2.0"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # half again as fast as the default, bfloat16, without AMX
INT8 = FLOAT32 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "192"}


def prepare(place: Place, precision: str) -> Launch:
    """Return how to run it with `int8` weights or with those of the GGUF file, `gguf`. Raise `Skipped`."""
    # torchvision comes in a build that does not fit torch's, and is not needed
    steps = (["install", pinned("torch"), PACKAGE, EXPORTER], ["uninstall", "--yes", "torchvision"])
    programs = environment(place.folder / "openvino", *steps)
    model, properties = (embedded_file(), FLOAT32) if precision == "gguf" else (_exported(place, programs), INT8)
    driver = Path(__file__).parent / "inside" / "drive_openvino.py"
    return Launch([str(programs / "python"), str(driver), str(model), json.dumps(properties)], version=PACKAGE)


def _exported(place: Place, programs: Path) -> Path:
    """Return the folder of the exported model, made once."""
    folder = place.folder / "models" / "openvino-int8"
    if not folder.exists():
        partial = folder.with_suffix(".part")
        export = [str(programs / "optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
        argv = [*export, "--weight-format", "int8", "--model", str(place.model), str(partial)]
        call(argv, log(place.folder / "openvino"))
        partial.rename(folder)
    return folder
