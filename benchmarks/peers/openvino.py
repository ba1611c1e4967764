"""OpenVINO GenAI, in process: a model exported with 8- or 4-bit weights by optimum-intel, or a GGUF file itself."""

import json
from pathlib import Path

from benchmarks.peers.checkpoint import folder_of, made_once
from benchmarks.peers.environments import call, environment, log, pinned
from benchmarks.peers.launch import Launch, Place
from shared.hub.embedded import embedded_file

PACKAGE = "openvino-genai==2026.4.1.0"
EXPORTER = "optimum-intel[openvino]==2.2.0"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # half again as fast as the default, bfloat16, without AMX
# activations of 8 bits, in groups; groups of 4-bit weights must be a multiple of those
PROPERTIES = {
    "gguf": FLOAT32,
    "int8": FLOAT32 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "192"},
    "int4": FLOAT32 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"},
}
EXPORT = {
    "int8": (),
    "int4": ("--group-size", "128", "--ratio", "1.0"),
}  # of the layers' weights, which share has 4 bits


def prepare(place: Place, precision: str) -> Launch:
    """Return how to run it with weights of `int8`, `int4`, or those of the GGUF file, `gguf`. Raise `Skipped`."""
    # torchvision comes in a build that does not fit torch's, and is not needed
    steps = (["install", pinned("torch"), PACKAGE, EXPORTER], ["uninstall", "--yes", "torchvision"])
    programs = environment(place.folder / "openvino", *steps)
    model = embedded_file() if precision == "gguf" else _exported(place, programs, precision)
    driver = Path(__file__).parent / "inside" / "drive_openvino.py"
    argv = [str(programs / "python"), str(driver), str(model), json.dumps(PROPERTIES[precision])]
    return Launch(argv, version=PACKAGE)


def _exported(place: Place, programs: Path, precision: str) -> Path:
    """Return the folder of the exported model."""
    export = [str(programs / "optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
    export += ["--weight-format", precision, *EXPORT[precision], "--model", str(place.checkpoint)]
    target = folder_of(place.folder, place.model) / f"openvino-{precision}"
    return made_once(target, lambda partial: call([*export, str(partial)], log(place.folder / "openvino")))
