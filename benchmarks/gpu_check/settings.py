"""The sizes that are checked and measured: a Llama of 8 billion parameters on a GPU, a tiny one on a CPU."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Config = dict[str, Any]

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

TINY: Config = LLAMA_8B | {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 24,
}


class Prompts(NamedTuple):
    """Prompts of equal length."""

    number: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.number} × {self.tokens:,}"


@dataclass(frozen=True)
class Settings:
    """What to run, and on which device."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    repeats: int = 20
    limit_factor: float = 1.0  # of the seconds of each part
    model: Config | None = None  # of `engine` and `equality`; None: `LLAMA_8B`

    # machine
    copied_bytes: int = 2**31
    product_size: int = 8192
    launches: int = 200

    # tests
    test_files: tuple[str, ...] = ("",)  # in tests/gpu_kernels; "": all
    test_processes: int = 12

    # kernels
    decodes: tuple[Prompts, ...] = (Prompts(64, 4096), Prompts(1, 32768))
    chunk: int = 8192
    row_counts: tuple[int, ...] = (64, 8192)
    sampled_rows: int = 256

    # engine and equality
    context: int = 1024
    batches: tuple[int, ...] = (1, 32, 256)
    decode_steps: int = 40
    profiled_steps: int = 8
    prefills: tuple[Prompts, ...] = (Prompts(8, 1024), Prompts(1, 8192))
    max_model_len: int = 8448
    kv_gib: float | None = None  # of `engine`; None: what the memory leaves
    compared_batch: int = 32  # decodes with and without graphs and --batch-invariant
    compared_prompts: tuple[int, ...] = (900, 17, 300, 64, 129, 1, 511, 40)  # lengths; as many as a graph has rows
    compared_tokens: int = 32
    compared_step: int = 640  # tokens of a step at most, so that long prompts are cut where others leave room
    compared_kv_gib: float = 8.0

    @property
    def config(self) -> Config:
        """The model's config.json."""
        return self.model or LLAMA_8B

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


GPU = Settings()

QUICK = replace(
    GPU,
    repeats=5,
    model=LLAMA_8B | {"num_hidden_layers": 8},
    test_files=("test_gpu_attention.py", "test_gpu_elementwise.py"),
    decode_steps=16,
    batches=(1, 32),
)

CPU = Settings(
    device="cpu",
    dtype="float32",
    repeats=1,
    limit_factor=2.0,
    model=TINY,
    copied_bytes=2**20,
    product_size=64,
    launches=4,
    test_files=("test_gpu_prepare.py",),
    test_processes=0,
    decodes=(Prompts(3, 48), Prompts(1, 300)),
    chunk=40,
    row_counts=(5,),
    sampled_rows=4,
    context=6,
    batches=(1, 2),
    decode_steps=1,
    profiled_steps=1,
    prefills=(Prompts(2, 4), Prompts(1, 9)),
    max_model_len=24,
    kv_gib=0.01,
    compared_batch=2,
    compared_prompts=(3, 7),
    compared_tokens=2,
    compared_step=4,
    compared_kv_gib=0.01,
)


def choose_settings(device: str, *, quick: bool) -> Settings:
    """Return the settings of a run. A CPU's are quick anyway."""
    if device == "cpu":
        return CPU
    return QUICK if quick else GPU
