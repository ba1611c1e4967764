"""POST /tokenize, POST /detokenize and GET /tokenizer_info

A prompt is tokenized as that of a completion or a chat, by the same code, so its tokens are those that a model would
get.
"""

from typing import Any

from aiohttp import web

from services.gateway.api_requests import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from services.gateway.api_responses import DetokenizeResponse, TokenizeResponse
from services.gateway.body import read
from services.gateway.bounds import MAX_TEXT
from services.gateway.chat import tokenize_chat
from services.gateway.completions import tokenize_completion
from services.gateway.gateway import GATEWAY, Gateway
from services.gateway.prompt import LONG_TEXT, TokenizedPrompt, check_ids
from services.gateway.response import json_response
from services.gateway.sampling import chat_params, completion_params
from services.gateway.threads import run_in_thread_if
from shared.errors import InvalidRequest
from shared.protocol import Welcome
from shared.text.tokenizer import Tokenizer

TokenizeRequest = TokenizeCompletionRequest | TokenizeChatRequest
REQUEST_TYPES: tuple[type[TokenizeRequest], ...] = (TokenizeCompletionRequest, TokenizeChatRequest)


async def tokenize(http: web.Request) -> web.Response:
    """Answer with the tokens that the prompt of a completion or of a chat has, even if they exceed the context."""
    gateway = http.app[GATEWAY]
    request = await read(http, *REQUEST_TYPES)
    await gateway.choose_adapter(request.model)  # of the same tokenizer
    welcome = await gateway.backend.first_welcome()
    prompt = await _prompt(request, gateway, welcome)
    with_names = request.return_token_strs is True
    many = len(prompt.tokens) > LONG_TEXT
    return await run_in_thread_if(many, _respond, prompt, gateway.model.tokenizer, welcome.max_model_len, with_names)


async def detokenize(http: web.Request) -> web.Response:
    """Answer with the text of some tokens, special ones included."""
    gateway = http.app[GATEWAY]
    request = await read(http, DetokenizeRequest)
    await gateway.choose_adapter(request.model)  # of the same tokenizer
    welcome = await gateway.backend.first_welcome()
    many = len(request.tokens) > LONG_TEXT
    return await run_in_thread_if(many, _decode, request.tokens, gateway.model.tokenizer, welcome.model.vocab_size)


async def tokenizer_info(http: web.Request) -> web.Response:
    """Answer with the tokenizer's configuration (tokenizer_config.json) and the chat template in use."""
    model = http.app[GATEWAY].model
    template: dict[str, Any] = {"chat_template": model.template.source or None}
    return json_response({"tokenizer_class": None, **model.tokenizer_config, **template})


async def _prompt(request: TokenizeRequest, gateway: Gateway, welcome: Welcome) -> TokenizedPrompt:
    if isinstance(request, TokenizeChatRequest):
        params = chat_params(request, gateway.model.defaults)
        return await tokenize_chat(gateway, request, params, welcome, must_fit=False)
    params = completion_params(request, gateway.model.defaults)
    (prompt,) = await tokenize_completion(gateway, request, params, welcome, must_fit=False)
    return prompt


def _respond(prompt: TokenizedPrompt, tokenizer: Tokenizer, max_model_len: int, with_names: bool) -> web.Response:
    tokens = prompt.tokens.tolist()
    names = [tokenizer.token(id) for id in tokens] if with_names else None
    return json_response(TokenizeResponse(len(tokens), max_model_len, tokens, names))


def _decode(tokens: list[int], tokenizer: Tokenizer, vocab_size: int) -> web.Response:
    check_ids(tokens, vocab_size, "tokens")
    length = sum(len(tokenizer.bytes.later[id]) for id in tokens)
    if length > MAX_TEXT:
        raise InvalidRequest(f"an answer has at most {MAX_TEXT} bytes of text, but tokens have {length}", "tokens")
    return json_response(DetokenizeResponse(tokenizer.decode(tokens, skip_special_tokens=False)))
