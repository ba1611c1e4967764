"""`RequestBuilder`: makes requests of the prompts, conversations and parameters that a caller of `LLM` passes.

Nothing runs here. What is wrong with one of the arguments is said before any request of the call reaches the engine.
"""

import itertools
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import msgspec

from quire.adapters import AdapterChoice, Adapters
from quire.arguments import (
    PromptType,
    Tokenization,
    as_list,
    check_type,
    priorities,
    refuse,
    token_ids,
)
from quire.lora_request import LoRARequest
from quire.pending_beams import PendingBeams
from quire.pending_request import PendingRequest
from services.gateway.served_model import TextParts
from services.gateway.tools import check_tools, for_template
from services.scheduler.core import Limits
from shared.beam_params import BeamSearchParams
from shared.errors import InvalidRequest, ModelError, brief
from shared.params import SamplingParams, boolean, cache_salt
from shared.protocol import ReasoningLimit
from shared.text.bad_words import tokenize_bad_words
from shared.text.grammars import GrammarCompiler
from shared.text.message_grammar import message_grammar
from shared.text.message_parser import NONE, MessageFormat, ParserChoice
from shared.text.messages import text_of
from shared.text.reasoning_limit import reasoning_limit
from shared.text.template import CONTENT_FORMATS, ChatTemplate
from shared.text.truncation import Truncation

ChatMessage: TypeAlias = Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""Parameters for all prompts, or for each; None: the model's defaults."""

PROMPT_FIELDS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
"""What a prompt that is a mapping may have."""


class PromptOptions(TypedDict, total=False):
    """Options of a call.

    `priority` has a number for each prompt; lower ones run first, if `scheduling_policy` is `priority`.
    `tokenization_kwargs` can have `add_special_tokens`, `truncate_prompt_tokens` and `truncation_side`.
    `lora_request` is the adapter to use, or a list with one for each prompt. `mm_processor_kwargs` are refused unless
    they ask for nothing.
    """

    priority: Sequence[int] | None
    tokenization_kwargs: Mapping[str, Any] | None
    lora_request: AdapterChoice | Sequence[AdapterChoice]
    mm_processor_kwargs: Mapping[str, Any] | None


class ChatOptions(PromptOptions, total=False):
    """Options of a chat.

    `chat_template` (Jinja) is used instead of the model's. `chat_template_content_format` is `auto`, `string` or
    `openai`. `continue_final_message` continues the last message, and needs `add_generation_prompt` to be false.
    `tools` are functions in OpenAI's form, for the template, which gets `chat_template_kwargs` too.
    """

    chat_template: str | None
    chat_template_content_format: str
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class Prompt(NamedTuple):
    """A prompt as text, or None if it came as token ids only. `ids` are None if the text is still to be encoded."""

    text: str | None
    ids: list[int] | None = None
    cache_salt: str = ""
    format: MessageFormat | None = None  # of the output; None: it has no reasoning


class RequestBuilder:
    """Builds requests for an engine with these `limits`. Unseeded ones draw their seeds from `seed`.

    In chats, what `reasoning_parser` finds comes before an output of a demanded form.
    """

    def __init__(
        self,
        text: TextParts,
        limits: Limits,
        adapters: Adapters,
        *,
        max_logprobs: int,
        seed: int | None,
        reasoning_parser: str = "auto",
    ) -> None:
        self.tokenizer, self.template, self.defaults = text
        self._limits = limits
        self._adapters = adapters
        self._max_logprobs = max_logprobs
        self._reasoning_parser = reasoning_parser
        self._grammars: GrammarCompiler | None = None  # made when the first output has to follow one
        self._seeds = random.Random(seed)
        self.ids = itertools.count()  # of requests at the engine

    def default_params(self) -> SamplingParams:
        """Return the parameters of calls that have none."""
        return SamplingParams(**self.defaults.as_dict())

    def from_prompts(
        self, prompts: PromptType | Sequence[PromptType], params: Params, **options: Unpack[PromptOptions]
    ) -> list[PendingRequest]:
        """Return a request for a prompt, or for each of several. Raise `InvalidRequest` if one cannot be served."""
        return self._build([self._prompt(prompt) for prompt in as_list(prompts)], params, True, **options)

    def from_messages(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Params,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[PendingRequest]:
        """Return a request for a conversation, or for each of several. Raise as `from_prompts` does."""
        check_type("messages", messages, Sequence, "a list of messages, or of such lists")
        check_type("chat_template_kwargs", chat_template_kwargs, (Mapping, type(None)), "a mapping")
        boolean("add_generation_prompt", add_generation_prompt)
        boolean("continue_final_message", continue_final_message)
        single = bool(messages) and isinstance(messages[0], Mapping)
        template = self._template(chat_template, chat_template_content_format)
        variables = _tool_variables(tools, template) | dict(chat_template_kwargs or {})
        parsers = self._parsers(template)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = []
        for conversation in conversations:
            check_type("messages", conversation, Sequence, "a list of messages, or of such lists")
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
            continued = text_of(conversation[-1].get("content")) if continue_final_message else None
            format = MessageFormat(
                parsers,
                reasoning_is_open=parsers.reasoning_is_open(text, continued),
                reasoning_is_over=parsers.reasoning_is_over(text, continued),
            )
            prompts.append(Prompt(text, format=format))
        return self._build(prompts, params, False, **options)  # the template has written the special tokens

    def beam_searches(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams, lora_request: Any = None
    ) -> list[PendingBeams]:
        """Return a search for a prompt, or for each of several. Raise `InvalidRequest` if one cannot be served."""
        check_type("params", params, BeamSearchParams, "BeamSearchParams")
        read = [self._prompt(prompt) for prompt in as_list(prompts)]
        adapters = self._adapters.for_prompts(lora_request, len(read))
        return [self._beam_search(prompt, params, adapter) for prompt, adapter in zip(read, adapters, strict=True)]

    def _beam_search(self, prompt: Prompt, params: BeamSearchParams, adapter: LoRARequest | None) -> PendingBeams:
        tokens = self._tokens(prompt, None, add_special_tokens=True)
        sampling = params.sampling_params.to_sampling(
            prompt_len=len(tokens),
            max_model_len=self._limits.max_model_len,
            vocab_size=self._limits.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        params.settings.check(len(tokens), sampling, self._limits.vocab_size)
        return PendingBeams(tokens, params, sampling, cache_salt=prompt.cache_salt, adapter=adapter)

    def _build(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        add_special_tokens: bool,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PendingRequest]:
        refuse("mm_processor_kwargs", mm_processor_kwargs, "only text is served")
        tokenization = Tokenization.read(tokenization_kwargs, add_special_tokens=add_special_tokens)
        all_params = self._per_prompt(params, len(prompts))
        all_priorities = priorities(priority, len(prompts))
        adapters = self._adapters.for_prompts(lora_request, len(prompts))
        each = zip(prompts, all_params, all_priorities, adapters, strict=True)
        return [self._request(prompt, one, priority, tokenization, adapter) for prompt, one, priority, adapter in each]

    def _per_prompt(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        """Return checked copies, since a caller may have changed fields, or may do so while requests wait."""
        if params is None or isinstance(params, SamplingParams):
            return [self.default_params() if params is None else params.clone()] * num_prompts
        check_type("sampling_params", params, Sequence, "a SamplingParams, or a list of one for each prompt")
        if len(params) != num_prompts:
            message = f"there are {num_prompts} prompts, but {len(params)} sampling_params"
            raise InvalidRequest(message, "sampling_params")
        for one in params:
            check_type("sampling_params", one, SamplingParams, "a SamplingParams, or a list of one for each prompt")
        return [one.clone() for one in params]

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        tokenization: Tokenization,
        adapter: LoRARequest | None,
    ) -> PendingRequest:
        limits = self._limits
        if priority and limits.policy == "fcfs":
            raise InvalidRequest("priority needs LLM(scheduling_policy='priority')", "priority")
        self._check_logprobs(params)
        limit = tokenization.truncate_prompt_tokens
        truncation = Truncation.of(
            params.truncate_prompt_tokens if limit is None else limit,
            tokenization.truncation_side,
            max_tokens=params.max_tokens,
            max_model_len=limits.max_model_len,
        )
        tokens = self._tokens(prompt, truncation, tokenization.add_special_tokens)
        if params.seed is None or params.seed == -1:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        sampling = params.to_sampling(
            prompt_len=len(tokens),
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            grammar=self._grammar(params, prompt.format),
            bad_words=tokenize_bad_words(params.bad_words or (), self.tokenizer),
            reasoning_limit=self._reasoning_limit(params, tokens, prompt.format),
        )
        return PendingRequest(
            next(self.ids),
            prompt.text,
            tokens,
            params,
            sampling,
            self.tokenizer,
            priority=priority,
            # no other request has that salt, and so nothing is cached for this one
            cache_salt=secrets.token_hex(16) if params.skip_reading_prefix_cache else prompt.cache_salt,
            adapter=adapter,
            lacks_template=prompt.format is None and self.template.exists,
        )

    def _tokens(self, prompt: Prompt, truncation: Truncation | None, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt, or those that are kept of it. Special tokens that are added are among them."""
        if prompt.ids is None:
            tokens = self._encode(prompt.text or "", truncation, add_special_tokens)
        else:
            tokens = prompt.ids if truncation is None else truncation.cut(prompt.ids)
        if not tokens:
            raise InvalidRequest("a prompt must have at least one token", "prompt")
        return tokens

    def _encode(self, text: str, truncation: Truncation | None, add_special_tokens: bool) -> list[int]:
        try:
            if truncation is None:
                return self.tokenizer.encode(text, add_special_tokens)
            length, keep_start = truncation.max_tokens, truncation.keep_start
            ids, _ = self.tokenizer.encode_part(
                text, length, keep_start=keep_start, add_special_tokens=add_special_tokens
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt: {error.message}", "prompt") from error
        return ids

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._max_logprobs:
                raise InvalidRequest(f"{name} must be at most max_logprobs, {self._max_logprobs}, got {count}", name)

    def _grammar(self, params: SamplingParams, format: MessageFormat | None) -> str:
        """Return the grammar that an output has to follow, or "" if there is none. Raise `InvalidRequest`."""
        if params.structured_outputs is None:
            return ""
        self._grammars = self._grammars or GrammarCompiler(self.tokenizer)
        grammar = self._grammars.compile(params.structured_outputs)
        if format is not None and format.has_reasoning:
            grammar = message_grammar(format, grammar)
            self._grammars.check(grammar, "structured_outputs")
        return grammar

    def _reasoning_limit(
        self, params: SamplingParams, tokens: Sequence[int], format: MessageFormat | None
    ) -> ReasoningLimit | None:
        if params.max_reasoning_tokens is None:
            return None
        choice = self._parsers(self.template) if format is None else format.choice
        return reasoning_limit(params.max_reasoning_tokens, choice, tokens, format)

    def _parsers(self, template: ChatTemplate) -> ParserChoice:
        """Return what takes the outputs of a template's chats apart. Calls stay text."""
        return ParserChoice.make(
            template.source, self.tokenizer, tool_parser=NONE, reasoning_parser=self._reasoning_parser
        )

    def _template(self, source: str | None, content_format: str) -> ChatTemplate:
        """Return the template of a chat: the model's, unless the caller has another one or another format."""
        check_type("chat_template", source, (str, type(None)), "a text")
        if content_format not in ("auto", *CONTENT_FORMATS):
            formats = ", ".join(("auto", *CONTENT_FORMATS))
            raise InvalidRequest(
                f"chat_template_content_format must be one of {formats}, got {brief(content_format)}",
                "chat_template_content_format",
            )
        if source is None and content_format == "auto":
            return self.template
        try:
            return self.template.variant(source, content_format)
        except ModelError as error:
            raise InvalidRequest(f"chat_template: {error}", "chat_template") from error

    def _prompt(self, prompt: PromptType) -> Prompt:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        set_fields = {str(name) for name, value in prompt.items() if value is not None}
        if unknown := sorted(set_fields - PROMPT_FIELDS):
            raise InvalidRequest(f"a prompt cannot have {brief(unknown)}", "prompt")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None:
            check_type("prompt", text, str, "a text")
        if text is None and ids is None:
            raise InvalidRequest("a prompt needs a text as prompt, or prompt_token_ids", "prompt")
        tokens = None if ids is None else token_ids(ids, self._limits.vocab_size)
        return Prompt(text, tokens, cache_salt(prompt.get("cache_salt")))


def _tool_variables(tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables by which a template gets the tools. Raise `InvalidRequest` if it would not show them."""
    if not tools:
        return {"tools": None}
    check_type("tools", tools, Sequence, "a list of tools")
    check_tools(tools, None)
    if template.exists and not template.shows_tools:
        raise InvalidRequest("tools: the chat template does not show them; pass another as chat_template", "tools")
    return {"tools": for_template(tools)}
