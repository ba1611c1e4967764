"""Random plans for a real `ModelRunner` on the meta device, where nothing runs and what would wait for a GPU raises.

As a program, `python -m tests.gpu_kernels.meta_steps COUNT` compiles for sm_90 what a runner launches: in warm-up, then
in COUNT random steps. It prints both lists of objects as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace

from kernels.load import gpu
from services.scheduler.core import Limits, Scheduler
from services.worker.checkpoint.config_json import ConfigJson
from services.worker.config import WorkerConfig
from services.worker.models.adapters.adapters import Adapters, LoraSizes
from services.worker.models.adapters.targets import find_targets
from services.worker.models.decoder.decoder import Decoder
from services.worker.models.families import llama
from services.worker.models.load import LoadedModel
from services.worker.models.parameters import RandomWeights
from services.worker.models.precision import Precision
from services.worker.models.spec import Family
from services.worker.parallel_config import ParallelConfig
from services.worker.rank_group import RankGroup
from services.worker.runner import ModelRunner
from services.worker.warmup import Measurements
from shared.protocol import Configure, Epoch, ModelInfo, Sampling, StepPlan, Submit, pack_tokens
from tests.simulation.simulated_worker import VOCABULARY, SimulatedWorker

META = torch.device("meta")
EPOCH = Epoch(boot_id="meta", count=1)
LIMITS = Limits(num_blocks=400, max_num_seqs=12, max_num_batched_tokens=64, max_model_len=1500, block_size=16)
CONFIG = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


def meta_runner(family: Family = llama.FAMILY, **config: Any) -> ModelRunner:
    """Return a runner of a small model on the meta device, with the GPU's operations, not yet warm.

    It takes adapters, as if each of its slots held one.
    """
    spec = family.read_spec(ConfigJson(CONFIG | config))
    precision = Precision(dtype=torch.bfloat16, quantization=None, kv_dtype=torch.bfloat16)
    adapters = Adapters(find_targets(spec, family.names), LoraSizes(2, 16, torch.bfloat16), gpu(), META)
    weights = RandomWeights(spec, precision, META)
    model = Decoder(spec, weights, gpu(), kv_dtype=torch.bfloat16, lora=adapters.stacks)
    info = ModelInfo(
        name="", architecture="", dtype="", max_positions=2048, vocab_size=2000, fingerprint="", weights_digest=""
    )
    settings = WorkerConfig(kv_cache_memory=1.0, swap_space=0)
    loaded = LoadedModel(model, precision, "", "", RankGroup(ParallelConfig(), META), adapters)
    with patch("services.worker.runner.warm_up", lambda *_: Measurements(1.0, 1.0)):  # it reads results
        return ModelRunner(loaded, info, settings, META, gpu())


def sizes(limits: Limits = LIMITS) -> Configure:
    return Configure(
        epoch=EPOCH,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def random_plans(seed: int, count: int, limits: Limits = LIMITS) -> Iterator[StepPlan]:
    """Yield `count` plans of the scheduler for random requests, with every sampling parameter. Two of three sequences
    use an adapter.
    """
    random, core = Random(seed), Scheduler(limits)
    core.begin_epoch(EPOCH, limits.num_blocks)
    worker = SimulatedWorker(sizes(limits))
    for id in range(1_000_000):
        while random.random() < 0.15:
            length = random.choice([1, 5, 16, 40, 300])
            prompt = [random.randrange(VOCABULARY) for _ in range(length)]
            sampling, n = random_sampling(random), random.choice([1, 1, 1, 3])
            request = Submit(id * 1000 + random.randrange(1000), pack_tokens(prompt), length, sampling, n)
            core.submit(request, 1.0)
        if plan := core.plan(1.0):
            yield replace(
                plan, new_sequences=[replace(new, adapter_slot=new.slot % 3 - 1) for new in plan.new_sequences]
            )
            core.commit(worker.execute(plan))
            count -= 1
            if not count:
                return


def random_sampling(random: Random) -> Sampling:
    def sometimes(value: Callable[[], Any], otherwise: Any) -> Any:
        return value() if random.random() < 0.3 else otherwise

    return Sampling(
        max_tokens=random.randrange(1, 40),
        seed=random.getrandbits(64),
        temperature=random.choice([0.0, 0.0, 0.7, 1.5]),
        top_p=sometimes(random.random, 1.0) or 1.0,
        top_k=sometimes(lambda: random.randrange(100), 0),
        min_p=sometimes(random.random, 0.0),
        presence_penalty=sometimes(random.random, 0.0),
        frequency_penalty=sometimes(random.random, 0.0),
        repetition_penalty=sometimes(lambda: 1 + random.random(), 1.0),
        logit_bias=sometimes(lambda: [(random.randrange(2000), 1.5), (3, -2.0)], []),
        min_tokens=sometimes(lambda: random.randrange(9), 0),
        stop_token_ids=sometimes(lambda: [2, 5], []),
        grammar=sometimes(lambda: 'start: "a"', ""),
        logprobs=sometimes(lambda: random.choice([0, 1, 5, 20, 50]), -1),
        prompt_logprobs=sometimes(lambda: random.choice([0, 1, 5, 20, 50]), -1),
    )


def main(count: int) -> None:
    from kernels.gpu.launch import compile_for, on_compile

    warm_up: list[str] = []
    steps: list[str] = []
    on_compile(warm_up.append)
    compile_for(90)
    runner = meta_runner()
    with patch("services.worker.runner.report_compilations", lambda report: None):
        runner.configure(sizes())
    on_compile(steps.append)
    for plan in random_plans(1, count):
        runner.launch(plan)
    print(json.dumps({"warm-up": warm_up, "steps": steps}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
