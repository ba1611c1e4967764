"""llama.cpp's server, compiled for this processor from the source that llama-cpp-python carries.

Its models are made by its own quantiser: from the embedded model's file, whose 4-bit weights it widens first, or from
a checkpoint that its own converter has read.
"""

import os
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.checkpoint import folder_of, made_once
from benchmarks.peers.environments import Skipped, call, environment, log
from benchmarks.peers.launch import Launch, Place
from shared.hub.embedded import embedded_file

PACKAGE = "llama-cpp-python==0.3.36"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
# 64 requests of up to 768 tokens; without flash attention and with sampling in the backend it is fastest on CPUs here
FLAGS = ("-np", "64", "-c", "49152", "-cb", "-fa", "off", "-bs")


def prepare(place: Place, quantisation: str) -> Launch:
    """Return how to serve the model with Q4_0 or Q8_0 weights. Raise `Skipped`."""
    programs = _built(place.folder / "llama.cpp")
    model = _quantised(place, programs, quantisation)
    argv = [str(programs / "llama-server"), "-m", str(model), "--alias", place.name, "--port", "{port}"]
    return Launch([*argv, *FLAGS, "--threads", str(place.threads)], version=PACKAGE)


def _quantised(place: Place, programs: Path, quantisation: str) -> Path:
    """Return the GGUF file with these weights."""
    source = embedded_file() if place.model.shape is None else _converted(place)
    quantise = [str(programs / "llama-quantize"), "--allow-requantize", str(source)]
    logged = log(place.folder / "llama.cpp")
    target = folder_of(place.folder, place.model) / f"{quantisation}.gguf"
    return made_once(target, lambda partial: call([*quantise, str(partial), quantisation], logged))


def _converted(place: Place) -> Path:
    """Return the checkpoint as a GGUF file of 8 bits: one of 16 would be as large as the checkpoint."""
    folder = place.folder / "llama.cpp"
    convert = [sys.executable, str(_source(folder) / "convert_hf_to_gguf.py"), str(place.checkpoint)]
    convert += ["--outtype", "q8_0", "--outfile"]
    target = folder_of(place.folder, place.model) / "Q8_0.gguf"
    return made_once(target, lambda partial: call([*convert, str(partial)], log(folder)))


def _built(folder: Path) -> Path:
    """Return the folder with the programs."""
    tools = environment(folder, ["install", "cmake", "ninja"])
    programs = folder / "build" / "bin"
    if (programs / "llama-server").exists() and (programs / "llama-quantize").exists():
        return programs
    print(f"Compiling llama.cpp, which takes a while (see {log(folder)})", flush=True)
    source = _source(folder)
    make = [str(tools / "cmake"), "--build", str(folder / "build"), "-j", str(os.cpu_count())]
    path = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    call(
        [str(tools / "cmake"), "-S", str(source), "-B", str(folder / "build"), "-G", "Ninja", *OPTIONS],
        log(folder),
        env=path,
    )
    call([*make, "--target", "llama-server", "llama-quantize"], log(folder), env=path)
    return programs


def _source(folder: Path) -> Path:
    """Return llama.cpp's folder inside the unpacked source package."""
    name = PACKAGE.replace("==", "-").replace("-", "_", 2)
    if not (folder / name).exists():
        fetch = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), PACKAGE]
        call([str(folder / "bin" / "python"), "-m", "pip", *fetch], log(folder))
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    source = folder / name / "vendor" / "llama.cpp"
    if not source.exists():
        raise Skipped(f"{PACKAGE} has no {source.relative_to(folder)}")
    return source
