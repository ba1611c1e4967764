"""OpenVINO GenAI's continuous batching, in process: `drive_openvino.py MODEL PROPERTIES-AS-JSON`.

MODEL is an exported folder or a GGUF file.
"""

import json
import sys
from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino_genai as genai
from closed_loop import Run, closed_loop, serve

CACHE = 2  # GiB
SEQUENCES = 64
BUDGET = 2048  # tokens a step


class Engine:
    """The pipeline with its requests."""

    def __init__(self, model: str, properties: dict[str, str]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = CACHE, SEQUENCES, BUDGET
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.handles: dict[int, genai.GenerationHandle] = {}

    def add(self, id: int, tokens: list[int], output: int) -> None:
        config = genai.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
        self.handles[id] = self.pipeline.add_request(id, ov.Tensor(np.array([tokens], dtype=np.int64)), config)

    def step(self) -> Iterator[tuple[int, int]]:
        self.pipeline.step()
        for id, handle in list(self.handles.items()):
            while handle.can_read():
                yield id, sum(len(output.generated_ids) for output in handle.read().values())
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self.handles[id]


def load() -> Run:
    return closed_loop(Engine(sys.argv[1], json.loads(sys.argv[2])))


if __name__ == "__main__":
    serve(load)
