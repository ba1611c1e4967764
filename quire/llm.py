"""`LLM`: a model in the caller's own process, for batches of prompts.

It uses the scheduler core, the runner and the text handling of the server, without the server. Its arguments have
vLLM's names. Other arguments of vLLM are accepted or refused as its flags are: see `quire.vllm`.
"""

import itertools
import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from quire import vllm
from quire.arguments import PromptType, as_list, check_type, token_ids
from quire.engine import InProcessEngine
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.pending_beams import PendingBeams, run_beams
from quire.pending_request import PendingRequest
from quire.progress_bar import ProgressBar
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.beam_params import BeamSearchParams
from shared.config import resolve
from shared.errors import ConfigError, InvalidRequest, QuireError, brief
from shared.hub.checkpoint import locate, locate_tokenizer
from shared.params import SamplingParams, cache_salt, whole
from shared.text.bad_words import tokenize_bad_words
from shared.text.grammars import GrammarCompiler
from shared.text.sampling_defaults import SamplingDefaults
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

ChatMessage: TypeAlias = Mapping[str, Any]

logger = logging.getLogger(__name__)


class LLM:
    """Load `model` (a folder, a .gguf file or a Hugging Face name; empty: the embedded one) and generate from it.

    Every argument but `seed` is a setting of the server with the same name, default and bounds. Of environment
    variables only VLLM_BATCH_INVARIANT counts. An unseeded request draws its seed from `seed`, so that a script gives
    the same outputs each time it runs; None makes them differ. Calls from several threads take turns. Raise
    `ConfigError` for an argument that is not supported, and `ModelError` for a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        seed: int | None = 0,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory: float | None = None,
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
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory": kv_cache_memory,
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
        arguments = translate_arguments(settings, others)
        scheduler = resolve(SchedulerConfig, arguments, {})
        worker = resolve(WorkerConfig, arguments, vllm.own_variables(os.environ))
        folder = locate(str(model), revision, download_dir)
        tokenizer_folder = locate_tokenizer(str(tokenizer), tokenizer_revision, download_dir) if tokenizer else folder
        self._tokenizer = Tokenizer.load(tokenizer_folder, folder if tokenizer else None)
        self._template = ChatTemplate.load(tokenizer_folder, self._tokenizer.special)
        self._template.sanity_check()
        self._grammars: GrammarCompiler | None = None  # made when the first output has to follow one
        self._defaults = SamplingDefaults.load(folder)
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._engine: InProcessEngine | None = InProcessEngine(scheduler, worker)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory. The object cannot generate any more."""
        with self._lock:
            self._engine = None

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which has `encode`, `decode` and `eos_token_ids`."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `generate` uses by default: those of generation_config.json, then vLLM's."""
        return SamplingParams(**self._defaults.as_dict())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, so that the next prompts are computed from their beginning. Return True."""
        with self._lock:
            self._running().reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt. Return one output for each, in the prompts' order.

        `sampling_params` are one for all prompts, or one for each. Raise `InvalidRequest`, before anything runs, for an
        argument of a wrong type, or if one of the prompts cannot be served.
        """
        prompt_list = as_list(prompts)
        with self._lock:
            engine = self._running()
            params = self._per_prompt(sampling_params, len(prompt_list))
            requests = [
                self._prepare(engine, prompt, prompt_params)
                for prompt, prompt_params in zip(prompt_list, params, strict=True)
            ]
            return run(engine, requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template or `chat_template` (Jinja).

        Raise as `generate` does.
        """
        check_type("messages", messages, Sequence, "a list of messages, or of such lists")
        check_type("chat_template", chat_template, (str, type(None)), "a text")
        check_type("chat_template_kwargs", chat_template_kwargs, (Mapping, type(None)), "a mapping")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        template = self._template if chat_template is None else ChatTemplate(chat_template, self._tokenizer.special)
        prompts: list[PromptType] = []
        for conversation in conversations:
            check_type("messages", conversation, Sequence, "a list of messages, or of such lists")
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={"tools": tools} | dict(chat_template_kwargs or {}),
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)  # the template has written the special tokens
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt. Return one output for each, in the prompts' order.

        `concurrency_limit` is the number of prompts that are searched at once; None: all. Raise `InvalidRequest`,
        before anything runs, for a wrong argument, or if one of the prompts cannot be served.
        """
        prompt_list = as_list(prompts)
        check_type("params", params, BeamSearchParams, "BeamSearchParams")
        limit = len(prompt_list) if concurrency_limit is None else whole("concurrency_limit", concurrency_limit)
        if limit < 1 and prompt_list:
            raise InvalidRequest(f"concurrency_limit must be at least 1, got {limit}", "concurrency_limit")
        with self._lock:
            engine = self._running()
            beams = [self._prepare_beams(engine, prompt, params) for prompt in prompt_list]
            with ProgressBar(len(beams), disable=not use_tqdm) as bar:
                for begin in range(0, len(beams), max(limit, 1)):
                    run_beams(engine, beams[begin : begin + limit], self._ids, bar)
        return [one.output(self._tokenizer) for one in beams]

    def _running(self) -> InProcessEngine:
        if self._engine is None:
            raise QuireError("this LLM is closed")
        return self._engine

    def _per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * num_prompts
        check_type("sampling_params", params, Sequence, "a SamplingParams, or a list of one for each prompt")
        if len(params) != num_prompts:
            message = f"there are {num_prompts} prompts, but {len(params)} sampling_params"
            raise InvalidRequest(message, "sampling_params")
        for one in params:
            check_type("sampling_params", one, SamplingParams, "a SamplingParams, or a list of one for each prompt")
        return params

    def _prepare(self, engine: InProcessEngine, prompt: PromptType, params: SamplingParams) -> PendingRequest:
        text, tokens = self._tokens(prompt, engine.model.vocab_size)
        salt = _cache_salt(prompt)
        if params.seed is None or params.seed == -1:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        sampling = params.to_sampling(
            prompt_len=len(tokens),
            max_model_len=engine.limits.max_model_len,
            vocab_size=engine.model.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            grammar=self._grammar(params),
            bad_words=tokenize_bad_words(params.bad_words or (), self._tokenizer),
        )
        return PendingRequest(next(self._ids), text, tokens, params, sampling, self._tokenizer, salt)

    def _prepare_beams(self, engine: InProcessEngine, prompt: PromptType, params: BeamSearchParams) -> PendingBeams:
        _, tokens = self._tokens(prompt, engine.model.vocab_size)
        sampling = params.sampling_params.to_sampling(
            prompt_len=len(tokens),
            max_model_len=engine.limits.max_model_len,
            vocab_size=engine.model.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
        )
        params.settings.check(len(tokens), sampling, engine.model.vocab_size)
        return PendingBeams(tokens, params, sampling, _cache_salt(prompt))

    def _grammar(self, params: SamplingParams) -> str:
        """Return the grammar that an output has to follow, or "" if there is none. Raise `InvalidRequest`."""
        if params.structured_outputs is None:
            return ""
        self._grammars = self._grammars or GrammarCompiler(self._tokenizer)
        return self._grammars.compile(params.structured_outputs)

    def _tokens(self, prompt: PromptType, vocab_size: int) -> tuple[str | None, list[int]]:
        """Return a prompt's text, or None if it came as token ids, and its token ids."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise InvalidRequest(f"a prompt cannot have {brief(sorted(map(str, unknown)))}", "prompt")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None:
            check_type("prompt", text, str, "a text")
        if ids is not None:
            tokens = token_ids(ids, vocab_size)
        elif text is not None:
            tokens = self._tokenizer.encode(text)
        else:
            raise InvalidRequest("a prompt needs a text as prompt, or prompt_token_ids", "prompt")
        if not tokens:
            raise InvalidRequest("a prompt must have at least one token", "prompt")
        return text, tokens


def _cache_salt(prompt: PromptType) -> str:
    """Return a prompt's cache salt, or "" if it has none. Raise `InvalidRequest` for a wrong one."""
    return cache_salt(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else ""


def run(engine: InProcessEngine, requests: Sequence[PendingRequest], *, use_tqdm: bool) -> list[RequestOutput]:
    """Run all requests until they have ended. After any exception, Ctrl-C included, the engine is empty and usable."""
    open_requests = {request.id: request for request in requests}
    try:
        for request in requests:
            engine.submit(request.submit)
        with ProgressBar(len(requests), disable=not use_tqdm) as bar:
            while open_requests:
                for row in engine.step():
                    pending = open_requests.get(row.id)
                    if pending is None:  # a stop string has ended it
                        continue
                    if pending.apply(row):
                        engine.abort(row.id, row.sample)
                    if pending.text.finished:
                        del open_requests[row.id]
                        bar.count_finished(len(pending.tokens), pending.text.num_output_tokens)
    except BaseException:
        engine.reset(list(open_requests))
        raise
    return [request.output() for request in requests]


def translate_arguments(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None, with vLLM's settings in `others` under Quire's names.

    Raise `ConfigError` for one that is not supported.
    """
    arguments = {name: value for name, value in {**settings, **others}.items() if value is not None}
    if str(num_engines := arguments.pop("data_parallel_size", 1)) != "1":
        raise ConfigError(f"data_parallel_size={num_engines} is not supported: LLM is one engine")
    own, notes = vllm.translate(arguments, python=True)
    for line in notes:
        logger.info("%s", line)
    for name in own:
        if name not in settings:
            raise ConfigError(f"LLM has no argument {name}")
    return own
