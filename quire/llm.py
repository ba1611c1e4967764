"""`LLM`: a model in the caller's own process, for batches of prompts.

It uses the scheduler core, the runner and the text handling of the server, without the server. Its arguments have
vLLM's names. Other arguments of vLLM are accepted or refused as its flags are: see `quire.vllm`.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from tqdm import tqdm

from quire import vllm
from quire.adapters import AdapterChoice, Adapters, AdapterSet
from quire.arguments import PromptType, seed_of, translate_arguments
from quire.engine import InProcessEngine
from quire.llm_metrics import Metric, read_metrics
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.pending_beams import run_beams
from quire.pending_request import PendingRequest
from quire.progress_bar import ProgressBar
from quire.request_builder import ChatMessage, ChatOptions, Params, PromptOptions, RequestBuilder
from quire.template_hint import hint_at_template
from services.gateway.config import GatewayConfig
from services.gateway.served_model import TextParts
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.beam_params import BeamSearchParams
from shared.config import resolve
from shared.errors import InvalidRequest, QuireError, brief
from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED
from shared.params import SamplingParams, whole
from shared.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UseTqdm: TypeAlias = bool | Callable[..., "tqdm[Any]"]
"""Whether to show a progress bar, or what makes it."""


class LLM:
    """Load `model` (a folder, a .gguf file or a Hugging Face name; empty: the embedded one) and generate from it.

    Every argument but `seed` is a setting of the server with the same name, default and bounds; `others` may be those
    of `OTHER_SETTINGS`, and vLLM's; `hf_token` is put into the environment as HF_TOKEN. Of environment variables only
    VLLM_BATCH_INVARIANT counts, and those of Hugging Face. An unseeded request draws its seed from `seed`, so that a
    script gives the same outputs each time it runs; None makes them differ. Calls from several threads take turns. All
    runs in this process, but for ranks besides the first that samples, which are processes of Quire's own. So a script
    needs no `if __name__ == "__main__"`. Raise `ConfigError` for an argument that is
    not supported, and `ModelError` for a model that cannot be loaded.

    Methods raise `InvalidRequest`, which names the argument, before anything runs. A method of vLLM's that is not here
    is an `AttributeError` that says why.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        seed: int | None = 0,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory: float | None = None,
        swap_space: float | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool | None = None,
        num_gpu_blocks_override: int | None = None,
        load_format: str | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
        model_impl: str | None = None,
        batch_invariant: bool | None = None,
        enforce_eager: bool | None = None,
        num_threads: int | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | None = None,
        **others: Any,
    ) -> None:
        settings = {
            "model": str(model),
            "revision": revision,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory": kv_cache_memory,
            "swap_space": swap_space,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "num_gpu_blocks_override": num_gpu_blocks_override,
            "load_format": load_format,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "model_impl": model_impl,
            "batch_invariant": batch_invariant,
            "enforce_eager": enforce_eager,
            "num_threads": num_threads,
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "tokenizer_revision": tokenizer_revision,
            "download_dir": download_dir,
        }
        if isinstance(token := others.pop("hf_token", None), str):  # True: the one that is stored on this machine
            os.environ["HF_TOKEN"] = token
        seed, arguments = seed_of(seed), translate_arguments(settings, others)
        scheduler = resolve(SchedulerConfig, arguments, {})
        worker = resolve(WorkerConfig, arguments, vllm.own_variables(os.environ))
        text = resolve(GatewayConfig, arguments, {})
        parts = TextParts.load(text, locate(text.model, text.revision, text.download_dir))
        self._process = os.getpid()
        self._world_size = worker.parallel.world_size
        self._name = text.served_model_name[0] if text.served_model_name else text.model or EMBEDDED
        self._lock = threading.Lock()
        self._engine: InProcessEngine | None = InProcessEngine(scheduler, worker)
        self._adapters = Adapters(self._engine)
        self._builder = RequestBuilder(
            parts,
            self._engine.limits,
            self._adapters,
            max_logprobs=text.max_logprobs,
            seed=seed,
            reasoning_parser=text.reasoning_parser,
        )
        self._queue: list[PendingRequest] = []  # enqueued, not run yet
        self._hf_tokenizer: PreTrainedTokenizerFast | None = None

    def __repr__(self) -> str:
        return f"LLM(model={self._name!r})"

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError`, with the reason for a method of vLLM's."""
        reason = vllm.METHODS.get(name)
        raise AttributeError(f"LLM.{name} is not supported: {reason}" if reason else f"LLM has no {name}")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory. The object cannot generate any more."""
        with self._lock:
            if self._engine is not None and os.getpid() == self._process:
                self._engine.close()
            self._engine = None
            self._queue.clear()

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that makes token ids of prompts, and text of outputs."""
        return self._builder.tokenizer

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """Return the model's tokenizer as one of transformers, with its chat template. The first call imports those."""
        if self._hf_tokenizer is None:
            from transformers import PreTrainedTokenizerFast  # imported here since it takes seconds

            self._hf_tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=self.tokenizer.backend, clean_up_tokenization_spaces=False, **self.tokenizer.special
            )
            self._hf_tokenizer.chat_template = self._builder.template.source or None
        return self._hf_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `generate` uses by default: those of generation_config.json, then vLLM's."""
        return self._builder.default_params()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics since it was started: the same as a server's at /metrics."""
        with self._lock:
            return read_metrics(self._name, self._running().engine.snapshot)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks that compute the model together."""
        return self._world_size

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, so that the next prompts are computed from their beginning. Return True."""
        with self._lock:
            self._running().reset_prefix_cache()
        return True

    def set_adapters(self, adapters: AdapterSet) -> None:
        """Load these adapters (LoRA), and forget those that were loaded before and are not among them.

        They are folders by name, or a list of folders, whose last part is the name, and of `LoRARequest`s. Calls choose
        one by `lora_request`. It needs `enable_lora`.
        """
        with self._lock:
            self._running()
            self._adapters.set(adapters)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput]:
        """Continue each prompt. Return one output for each, in the prompts' order.

        `sampling_params` are one for all prompts, or one for each.
        """
        with self._lock:
            requests = self._builder.from_prompts(prompts, sampling_params, **options)
            return run(self._running(), requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through a chat template.

        The text of an output is all that the model wrote, calls of tools included.
        """
        with self._lock:
            requests = self._builder.from_messages(messages, sampling_params, **options)
            return run(self._running(), requests, use_tqdm=use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[PromptOptions],
    ) -> list[str]:
        """Keep prompts for `wait_for_completion`. Return the `request_id` of each. It is too quick to show a bar."""
        with self._lock:
            return self._enqueue(self._builder.from_prompts(prompts, sampling_params, **options))

    def enqueue_chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        **options: Unpack[ChatOptions],
    ) -> list[str]:
        """Keep conversations for `wait_for_completion`, as `enqueue` does."""
        with self._lock:
            return self._enqueue(self._builder.from_messages(messages, sampling_params, **options))

    def wait_for_completion(
        self, output_type: type[Any] | tuple[type[Any], ...] | None = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Run all that is enqueued, together. Return one output for each, in order. After an exception, none is left.

        `output_type` must be `RequestOutput`, or a tuple with it: there are no other outputs.
        """
        types = output_type if isinstance(output_type, tuple) else (output_type or RequestOutput,)
        if RequestOutput not in types:
            raise InvalidRequest(f"output_type must be RequestOutput, got {brief(output_type)}", "output_type")
        with self._lock:
            requests, self._queue = self._queue, []
            return run(self._running(), requests, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt. Return one output for each, in the prompts' order.

        `concurrency_limit` is the number of prompts that are searched at once; None: all. Raise `InvalidRequest`,
        before anything runs, for a wrong argument, or if one of the prompts cannot be served.
        """
        limit = None if concurrency_limit is None else whole("concurrency_limit", concurrency_limit)
        if limit is not None and limit < 1:
            raise InvalidRequest(f"concurrency_limit must be at least 1, got {limit}", "concurrency_limit")
        with self._lock:
            engine = self._running()
            beams = self._builder.beam_searches(prompts, params, lora_request)
            limit = limit or max(len(beams), 1)
            with ProgressBar(len(beams), use_tqdm) as bar:
                for begin in range(0, len(beams), limit):
                    run_beams(engine, beams[begin : begin + limit], self._builder.ids, bar)
        return [one.output(self.tokenizer) for one in beams]

    def _running(self) -> InProcessEngine:
        if self._engine is None:
            raise QuireError("this LLM is closed")
        if os.getpid() != self._process:  # a fork has none of its threads, for which a step would wait for ever
            raise QuireError("this LLM was made before a fork, and works in the first process alone: make one here")
        return self._engine

    def _enqueue(self, requests: Sequence[PendingRequest]) -> list[str]:
        self._running()
        self._queue += requests
        return [str(request.id) for request in requests]


def run(engine: InProcessEngine, requests: Sequence[PendingRequest], *, use_tqdm: UseTqdm) -> list[RequestOutput]:
    """Run all requests until they have ended. After any exception, Ctrl-C included, the engine is empty and usable."""
    open_requests = {request.id: request for request in requests}
    try:
        for request in requests:
            engine.submit(request.submit(time.monotonic()))
        with ProgressBar(len(requests), use_tqdm) as bar:
            while open_requests:
                rows, now = engine.step(), time.monotonic()
                for row in rows:
                    pending = open_requests.get(row.id)
                    if pending is None:  # its text has ended it
                        continue
                    if pending.apply(row, now):
                        engine.abort(row.id, row.sample)
                    if pending.text.finished:
                        del open_requests[row.id]
                        bar.count_finished(len(pending.tokens), pending.text.num_output_tokens)
    except BaseException:
        engine.reset(list(open_requests))
        raise
    hint_at_template(requests)
    return [request.output() for request in requests]
