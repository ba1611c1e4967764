"""What `/openapi.json` says of the fields of requests beside their types: descriptions and bounds, as JSON Schema.

They stand apart from the structs that decode requests, which stay readable so. They check nothing: the bounds are those
of `shared/params.py`, `tools.py`, `structured_outputs.py` and `shared/text/messages.py`, and a test sends what lies
beyond them.
"""

from collections.abc import Mapping
from typing import Any

from shared.beam_params import MAX_LENGTH_PENALTY
from shared.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_THINKING_TOKENS,
    SEED_MAX,
    SEED_MIN,
)
from shared.protocol import (
    MAX_BAD_WORDS,
    MAX_CACHE_SALT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)
from shared.structured_outputs import KINDS, StructuredOutputsParams
from shared.text.tool_parsers.tool_parser import MAX_NAME

Schema = Mapping[str, Any]

_STOP = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
_NULLABLE_TEXT = {"type": ["string", "null"]}

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}

_CALLED_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "arguments": {"type": ["string", "object", "null"], "description": "A JSON object, or its text."},
    },
}

MESSAGE: Schema = {
    "type": "object",
    "description": "Other fields reach the chat template unchanged.",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [_NULLABLE_TEXT, {"type": "array", "items": _TEXT_PART}]},
        "tool_calls": {
            "type": ["array", "null"],
            "items": {"type": "object", "required": ["function"], "properties": {"function": _CALLED_FUNCTION}},
        },
    },
}

TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}$"},
                "description": _NULLABLE_TEXT,
                "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments."},
                "strict": {"type": ["boolean", "null"], "description": "Enforce the schemas of all tools."},
            },
        },
    },
}

TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}

FIELDS: Mapping[str, Schema] = {
    # what is asked, and of whom
    "model": {"description": "One of the served names."},
    "prompt": {"description": "A text, its token ids, or a list of texts or of lists of ids."},
    "messages": {"description": "The conversation so far.", "minItems": 1, "items": MESSAGE},
    "tokens": {"description": "Token ids."},
    # how the prompt is made
    "add_special_tokens": {
        "description": "Add tokens such as BOS to the prompt. Default: true in a completion, and false in a chat, "
        "whose template writes them."
    },
    "add_generation_prompt": {"description": "Begin the model's message after the last one. Default: true."},
    "continue_final_message": {
        "description": "Let the model go on with the last message; add_generation_prompt must be false."
    },
    "chat_template_kwargs": {"description": "Variables of the chat template."},
    "chat_template": {"description": "A chat template to use instead of the model's."},
    "documents": {"description": "Documents for the chat template."},
    "reasoning_effort": {"description": "How much to think; a variable of the chat template."},
    "truncate_prompt_tokens": {
        "description": "Keep only so many tokens of the prompt; -1: as many as fit.",
        "minimum": -1,
    },
    "truncation_side": {"description": "The side on which tokens are dropped. Default: left."},
    # tools and forms
    "tools": {"description": "The functions that the model may call.", "items": TOOL},
    "tool_choice": {"description": "Default: auto if there are tools.", **TOOL_CHOICE},
    "parallel_tool_calls": {"description": "False: only the first call is kept. Default: true."},
    "response_format": {
        "description": "The form of the answer; json_schema and structural_tag have further fields.",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}},
    },
    "structured_outputs": {
        "description": f"The form of the answer, by exactly one of {', '.join(KINDS)}.",
        "properties": dict.fromkeys(StructuredOutputsParams.__struct_fields__, True),
        "additionalProperties": False,
    },
    "guided_json": {"description": "A JSON schema that the answer follows, or its text."},
    "guided_regex": {"description": "A regular expression that the answer matches."},
    "guided_choice": {"description": "Texts of which the answer is one."},
    "guided_grammar": {"description": "A grammar that the answer follows, in Lark's or GBNF's notation."},
    "guided_whitespace_pattern": {
        "description": "With guided_json: a regular expression for the whitespace between JSON's tokens."
    },
    # sampling; without a default here it is the model's own (generation_config.json)
    "n": {"description": "Number of outputs of each prompt. Default: 1.", "minimum": 1, "maximum": MAX_N},
    "best_of": {
        "description": "The number of beams of a search; otherwise only a value equal to n is taken.",
        "minimum": 1,
        "maximum": MAX_N,
    },
    "temperature": {"description": "0: the likeliest token.", "minimum": 0, "maximum": 2},
    "top_p": {
        "description": "Sample among the likeliest tokens that have this probability together.",
        "exclusiveMinimum": 0,
        "maximum": 1,
    },
    "top_k": {"description": "Sample among so many of the likeliest tokens; 0 and -1: among all.", "minimum": -1},
    "min_p": {
        "description": "Sample among tokens with at least this part of the likeliest one's probability.",
        "minimum": 0,
        "maximum": 1,
    },
    "seed": {
        "description": "The same seed gives the same output again; -1: none.",
        "minimum": SEED_MIN,
        "maximum": SEED_MAX,
    },
    "presence_penalty": {
        "description": "Subtracted from the logits of tokens that the output has.",
        "minimum": -2,
        "maximum": 2,
    },
    "frequency_penalty": {
        "description": "Subtracted from the logit of a token each time that the output has it.",
        "minimum": -2,
        "maximum": 2,
    },
    "repetition_penalty": {
        "description": "Divides positive logits of tokens that prompt or output have, and multiplies negative ones.",
        "minimum": MIN_REPETITION_PENALTY,
        "maximum": MAX_REPETITION_PENALTY,
    },
    "logit_bias": {
        "description": "Added to the logits of tokens, by their ids.",
        "maxProperties": MAX_LOGIT_BIAS,
        "additionalProperties": {"type": "number"},
    },
    "allowed_token_ids": {
        "description": "The only tokens that may be sampled.",
        "minItems": 1,
        "maxItems": MAX_ALLOWED_TOKEN_IDS,
    },
    "bad_words": {
        "description": "Texts that the output must not have.",
        "maxItems": MAX_BAD_WORDS,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH},
    },
    "use_beam_search": {"description": "Look for the likeliest outputs instead of sampling."},
    "length_penalty": {
        "description": "With use_beam_search: above 1 it favours longer outputs.",
        "minimum": -MAX_LENGTH_PENALTY,
        "maximum": MAX_LENGTH_PENALTY,
    },
    # the end of an output
    "max_tokens": {
        "description": "Maximum number of tokens of an output. Default: the model's own; else 16 in a completion, and "
        "the rest of the context in a chat.",
        "minimum": 0,
    },
    "max_completion_tokens": {"description": "The same as max_tokens, over which it wins.", "minimum": 0},
    "min_tokens": {
        "description": "Number of tokens before which neither a stop token nor a stop string ends an output.",
        "minimum": 0,
    },
    "stop": {
        "description": "Texts that end an output.",
        **_STOP,
        "maxItems": MAX_STOP_STRINGS,
        "items": {"type": "string", **_STOP},
    },
    "stop_token_ids": {"description": "Tokens that end an output.", "maxItems": MAX_STOP_TOKEN_IDS},
    "include_stop_str_in_output": {"description": "Show the stop string in the text."},
    "ignore_eos": {"description": "Go on after end-of-sequence tokens."},
    "repetition_detection": {"description": "End an output that repeats itself."},
    "thinking_token_budget": {
        "description": "End reasoning after so many tokens; -1: whenever the model likes.",
        "minimum": -1,
        "maximum": MAX_THINKING_TOKENS,
    },
    "max_pattern_size": {
        "description": "Tokens of the longest pattern that is looked for; with 0 none is.",
        "minimum": 0,
        "maximum": MAX_PATTERN_SIZE,
    },
    "min_pattern_size": {
        "description": "Tokens of the shortest pattern, at most max_pattern_size; 0 is 1.",
        "minimum": 0,
        "maximum": MAX_PATTERN_SIZE,
    },
    "min_count": {
        "description": "Copies of a pattern, one behind the other, that end an output: at least 2 if there is a "
        "max_pattern_size.",
        "minimum": 0,
        "maximum": MAX_PATTERN_COUNT,
    },
    # what the answer has
    "stream": {"description": "Answer with server-sent events, as the output comes."},
    "stream_options": {"description": "Needs stream."},
    "stream_interval": {"description": "Number of tokens of a chunk. Default: 1.", "minimum": 1},
    "include_usage": {"description": "Add a last chunk with the usage."},
    "continuous_usage_stats": {"description": "With include_usage: add the usage so far to every chunk."},
    "echo": {
        "description": "Begin the text with the prompt, or in a chat with the last message if its role is the one that "
        "answers."
    },
    "logprobs": {
        "description": "Log-probabilities: in a chat, whether there are any; in a completion, for how many of the "
        "likeliest tokens at each place.",
        "minimum": 0,
        "maximum": MAX_LOGPROBS,
    },
    "top_logprobs": {
        "description": "Log-probabilities of so many of the likeliest tokens at each place; needs logprobs.",
        "minimum": 0,
        "maximum": MAX_LOGPROBS,
    },
    "prompt_logprobs": {
        "description": "Log-probabilities of the prompt's tokens and of so many others; not in a stream.",
        "minimum": 0,
        "maximum": MAX_LOGPROBS,
    },
    "logprob_token_ids": {
        "description": "The tokens whose log-probabilities come, instead of the likeliest ones; needs logprobs.",
        "maxItems": MAX_LOGPROB_TOKEN_IDS,
    },
    "skip_special_tokens": {"description": "Leave the names of special tokens out of the text. Default: true."},
    "spaces_between_special_tokens": {"description": "Put spaces between special tokens that are shown."},
    "return_prompt_text": {"description": "Show the text of the prompt, too."},
    "return_token_ids": {"description": "Show the token ids of prompt and output, too."},
    "return_tokens_as_token_ids": {"description": "Write tokens as token_id:N in log-probabilities."},
    "include_reasoning": {"description": "False: leave the reasoning out of the answer. Default: true."},
    "return_token_strs": {"description": "Show the tokens as the vocabulary spells them, too."},
    # the queue and the cache
    "request_id": {"description": "The id of the request, unless it has the header X-Request-Id."},
    "cache_salt": {
        "description": "The prefix cache is shared only by requests with the same one.",
        "minLength": 1,
        "maxLength": MAX_CACHE_SALT,
    },
    "priority": {
        "description": "Lower is served first (--scheduling-policy priority).",
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
    },
}
"""JSON Schema of each field of the requests, which is added to what its type gives."""

_RESPONSES_TOOL = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **TOOL["properties"]["function"]["properties"]},
}

_NAMED_FUNCTION = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}

_FORM = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": {"description": "Of the schema."},
        "schema": {"description": "The JSON schema that the answer follows."},
    },
}

_ITEM_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
            },
        },
    ]
}

_ITEM = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"enum": ["message", None]},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _ITEM_CONTENT,
            },
        },
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"const": "reasoning"},
                "content": {
                    "type": ["array", "null"],
                    "items": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
                },
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"},
                "call_id": {"type": "string"},
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "The text of a JSON object."},
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": {"type": "string", "description": "That of a call before it."},
                "output": _ITEM_CONTENT,
            },
        },
    ]
}

RESPONSES_FIELDS: Mapping[str, Schema] = {
    "input": {
        "description": "A user's message, or the items of the conversation.",
        "minLength": 1,
        "minItems": 1,
        "items": _ITEM,
    },
    "instructions": {"description": "A system message before the input."},
    "tools": {"description": "The functions that the model may call.", "items": _RESPONSES_TOOL},
    "tool_choice": {
        "description": "Default: auto if there are tools.",
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _NAMED_FUNCTION,
            {
                "type": "object",
                "required": ["type", "mode", "tools"],
                "properties": {
                    "type": {"const": "allowed_tools"},
                    "mode": {"enum": ["auto", "required"]},
                    "tools": {"type": "array", "items": _NAMED_FUNCTION},
                },
            },
        ],
    },
    "text": {"description": "The form of the answer.", "properties": {"format": _FORM}},
    "reasoning": {
        "description": "effort: how much to think; a variable of the chat template. Reasoning is shown as it is, "
        "without a summary."
    },
    "max_output_tokens": {
        "description": "Maximum number of tokens of the output, reasoning included. Default: the model's own; else the "
        "rest of the context.",
        "minimum": 0,
    },
    "include": {"description": "message.output_text.logprobs: show log-probabilities."},
    "top_logprobs": {
        "description": "Log-probabilities of so many of the likeliest tokens at each place; needs include.",
        "minimum": 0,
        "maximum": MAX_LOGPROBS,
    },
    "truncation": {"description": "auto: drop the beginning of a prompt that does not fit. Default: disabled."},
    "background": {"description": "Only false."},
    **{
        name: {"description": "Only null: nothing is kept."}
        for name in ("conversation", "previous_response_id", "prompt")
    },
    **{
        name: {"description": "Taken, and without effect."}
        for name in (
            "max_tool_calls", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store",
            "stream_options", "user",
        )
    },
}  # fmt: skip
"""The same of fields that are the Responses API's alone, or differ there."""

PROMPT_FIELDS = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs",
        "continue_final_message", "documents", "max_completion_tokens", "max_tokens", "messages", "model", "prompt",
        "reasoning_effort", "return_token_strs", "tool_choice", "tools", "truncate_prompt_tokens", "truncation_side",
    }
)  # fmt: skip
"""The fields that make a difference to /tokenize. It takes the others too, but they would only hide these."""
