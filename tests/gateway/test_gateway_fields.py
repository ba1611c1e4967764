"""Lists the fields of the API, each with the test that proves its effect. A new field needs a line here."""

import importlib

import pytest

from services.gateway.api_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    StreamOptions,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from services.gateway.responses_input import COPIED_FIELDS, REFUSED
from services.gateway.unsupported_fields import HINTS, NEUTRAL_VALUES, STREAM_HINTS

STREAMS, STOPS, LIMITS = "test_gateway_streaming", "test_gateway_stops", "test_gateway_limits"
FORMS = "test_gateway_structured_outputs"
SCORES, HTTP, CHATS = "test_gateway_logprobs", "test_gateway_http", "test_gateway_chat"
BEAMS, TOOLS, REASONING = "test_gateway_beam_search", "test_gateway_tools", "test_gateway_reasoning"
TOKENS, ANSWERS = "test_gateway_tokenize", "test_gateway_answer_fields"
RESPONSES = "test_gateway_responses"

REQUESTS = (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
PROOFS = {
    "add_generation_prompt": (CHATS, "test_without_a_generation_prompt_the_message_is_closed"),
    "add_special_tokens": (CHATS, "test_a_template_that_prints_bos_gives_one_only"),
    "allowed_token_ids": (LIMITS, "test_allowed_tokens_and_bad_words_reach_the_engine"),
    "bad_words": (LIMITS, "test_allowed_tokens_and_bad_words_reach_the_engine"),
    "cache_salt": (LIMITS, "test_a_salt_reaches_the_engine"),
    "chat_template_kwargs": (CHATS, "test_template_variables_reach_the_template"),
    "continue_final_message": (CHATS, "test_a_message_is_continued"),
    "continuous_usage_stats": (STREAMS, "test_continuous_usage_grows_with_the_chunks"),
    "frequency_penalty": (LIMITS, "test_extra_fields_reach_the_engine"),
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern"),
        (FORMS, "test_a_demand_reaches_the_engine"),
    ),
    "ignore_eos": (STOPS, "test_ignore_eos_goes_on"),
    "include_stop_str_in_output": (STOPS, "test_include_stop_str_in_output_shows_it"),
    "include_usage": (STREAMS, "test_usage_comes_once_and_only_if_asked_for"),
    "length_penalty": (BEAMS, "test_the_length_penalty_reaches_the_search"),
    "logit_bias": (LIMITS, "test_a_valid_bias_reaches_the_engine"),
    "logprob_token_ids": (SCORES, "test_named_tokens_are_the_alternatives"),
    "logprobs": (SCORES, "test_a_completions_entries"),
    "max_completion_tokens": (LIMITS, "test_max_completion_tokens_wins"),
    "max_tokens": (LIMITS, "test_up_to_the_context"),
    "messages": (CHATS, "test_parts_give_the_same_tokens_as_a_string"),
    "min_p": (LIMITS, "test_extra_fields_reach_the_engine"),
    "min_tokens": (STOPS, "test_min_tokens_delays_stop_strings_and_stop_tokens"),
    "model": (HTTP, "test_an_unknown_model_is_not_found"),
    "n": (STREAMS, "test_choices_end_one_by_one"),
    "presence_penalty": (LIMITS, "test_extra_fields_reach_the_engine"),
    "priority": (LIMITS, "test_extra_fields_reach_the_engine"),
    "prompt": (STREAMS, "test_choices_are_numbered_by_prompt_then_sample"),
    "prompt_logprobs": (SCORES, "test_prompt_logprobs_are_by_token_id"),
    "repetition_penalty": (LIMITS, "test_extra_fields_reach_the_engine"),
    "response_format": (FORMS, "test_a_demand_reaches_the_engine"),
    "seed": (LIMITS, "test_seeds_at_the_limits_and_unseeded_requests"),
    "skip_special_tokens": (STOPS, "test_a_stop_token"),
    "stop": (STOPS, "test_a_stop_string_over_several_tokens"),
    "stop_token_ids": (STOPS, "test_a_stop_token"),
    "stream": (STREAMS, "test_choices_end_one_by_one"),
    "stream_options": (STREAMS, "test_stream_options_need_a_stream"),
    "structured_outputs": (FORMS, "test_a_demand_reaches_the_engine"),
    "thinking_token_budget": (REASONING, "test_a_budget_reaches_the_engine"),
    "temperature": (LIMITS, "test_extra_fields_reach_the_engine"),
    "top_k": (LIMITS, "test_extra_fields_reach_the_engine"),
    "top_logprobs": (SCORES, "test_a_chats_entries"),
    "top_p": (LIMITS, "test_extra_fields_reach_the_engine"),
    "use_beam_search": (BEAMS, "test_a_completion_has_the_best_beams"),
    **dict.fromkeys(HINTS | STREAM_HINTS, (LIMITS, "test_hints_are_taken_in_silence")),
    **dict.fromkeys(NEUTRAL_VALUES, (LIMITS, "test_fields_that_others_have_are_said_not_to_be_supported")),
    "best_of": (BEAMS, "test_best_of_beams_n_are_returned"),
    "chat_template": ("test_gateway_request_template", "test_a_template_of_a_request_renders_its_messages"),
    "repetition_detection": (ANSWERS, "test_a_repetition_ends_an_output"),
    "request_id": (ANSWERS, "test_the_header_wins_over_the_body_and_both_over_a_new_id"),
    "return_prompt_text": (ANSWERS, "test_the_text_of_a_chats_prompt_may_be_shown"),
    "return_token_ids": (ANSWERS, "test_token_ids_come_with_their_text"),
    "return_tokens_as_token_ids": (ANSWERS, "test_tokens_may_be_named_by_their_ids"),
    "spaces_between_special_tokens": (ANSWERS, "test_special_tokens_may_stand_side_by_side"),
    "stream_interval": (ANSWERS, "test_chunks_may_hold_several_tokens"),
    "truncate_prompt_tokens": (ANSWERS, "test_a_prompt_is_cut_to_the_tokens_of_a_side"),
    "truncation_side": (ANSWERS, "test_a_prompt_is_cut_to_the_tokens_of_a_side"),
    "echo": (ANSWERS, "test_an_answer_may_begin_with_the_last_message"),
    "documents": (CHATS, "test_documents_reach_the_template"),
    "include_reasoning": (REASONING, "test_reasoning_may_be_left_out"),
    "parallel_tool_calls": (TOOLS, "test_only_the_first_call_is_kept"),
    "reasoning_effort": (REASONING, "test_the_effort_reaches_the_template"),
    "return_token_strs": (TOKENS, "test_the_tokens_are_shown_as_the_vocabulary_spells_them"),
    "tokens": (TOKENS, "test_detokenize_is_the_inverse"),
    "tool_choice": ("test_gateway_call_grammar", "test_a_demand_for_calls_reaches_the_engine"),
    "tools": (TOOLS, "test_a_call_as_a_whole_and_as_a_stream"),
}


RESPONSES_PROOFS = {
    **dict.fromkeys(COPIED_FIELDS, (RESPONSES, "test_the_prompt_and_the_sampling_are_those_of_a_chat")),
    **dict.fromkeys(
        (
            "max_tool_calls", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store",
            "stream_options", "user",
        ),
        (RESPONSES, "test_a_whole_answer"),
    ),
    **dict.fromkeys(REFUSED, ("test_gateway_errors", "test_no_error_is_left_out_of_the_table")),
    **dict.fromkeys(
        ("include", "max_output_tokens", "reasoning", "top_logprobs"),
        (RESPONSES, "test_the_prompt_and_the_sampling_are_those_of_a_chat"),
    ),
    "chat_template_kwargs": (RESPONSES, "test_effort_and_variables_reach_the_template"),
    "input": (RESPONSES, "test_the_items_of_one_turn_are_one_message"),
    "instructions": (RESPONSES, "test_a_string_is_a_users_message"),
    "logprob_token_ids": (SCORES, "test_named_tokens_are_the_alternatives"),
    "parallel_tool_calls": (RESPONSES, "test_only_the_first_call_is_kept_if_they_are_not_to_be_parallel"),
    "request_id": (RESPONSES, "test_ids_and_ignored_fields_are_in_the_headers"),
    "stream": (RESPONSES, "test_the_events_of_a_text"),
    "stream_interval": (RESPONSES, "test_several_tokens_may_come_in_an_event"),
    "text": (RESPONSES, "test_the_form_of_the_text_is_that_of_a_chat"),
    "thinking_token_budget": (REASONING, "test_a_budget_reaches_the_engine"),
    "tool_choice": (RESPONSES, "test_a_choice_may_name_a_function_or_allow_some"),
    "tools": (RESPONSES, "test_tools_have_a_function_of_their_own_in_a_chat"),
    "truncation": (RESPONSES, "test_a_prompt_that_is_too_long_is_cut_only_if_that_is_asked_for"),
}  # fmt: skip
"""The same of the Responses API, some of whose fields have another sense."""


def test_the_table_has_every_field_and_no_other() -> None:
    fields = {name for request in REQUESTS for name in request.__struct_fields__}
    assert set(PROOFS) == fields | set(NEUTRAL_VALUES) | HINTS | STREAM_HINTS


def test_the_table_of_responses_has_every_field_and_no_other() -> None:
    assert set(RESPONSES_PROOFS) == set(ResponsesRequest.__struct_fields__)


def test_no_field_is_in_two_tables() -> None:
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not HINTS & (fields | set(NEUTRAL_VALUES))


@pytest.mark.parametrize(("module", "test"), sorted({*PROOFS.values(), *RESPONSES_PROOFS.values()}))
def test_the_proofs_exist(module: str, test: str) -> None:
    assert callable(getattr(importlib.import_module(f"tests.gateway.{module}"), test))
