"""Names of vLLM 0.32 that its users may use, for docs/from-vllm.md. Those of settings are in `quire.vllm_settings`.

A name that Quire has is only listed. A name that it lacks has a reason in a table. `docs.from_vllm` looks which of them
the code has, and complains of a name that is wrong here.
"""

FLAGS = """
    allow_credentials allowed_headers allowed_methods allowed_origins api_key api_server_count async_scheduling
    block_size chat_template chat_template_content_format data_parallel_size default_chat_template_kwargs
    disable_fastapi_docs download_dir dtype enable_force_include_usage enable_log_requests enable_lora
    enable_prefix_caching enable_tokenizer_info_endpoint enforce_eager exclude_tools_when_tool_choice_none
    generation_config gpu_memory_utilization hf_token host kv_cache_dtype load_format log_level lora_modules
    max_cpu_loras max_logprobs max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_queued_reqs
    max_num_queued_tokens max_num_seqs model model_impl num_gpu_blocks_override otlp_traces_endpoint
    override_generation_config pipeline_parallel_size port quantization reasoning_parser revision root_path
    scheduling_policy served_model_name speculative_config sse_keep_alive_interval stream_interval
    tensor_parallel_size tokenizer tokenizer_revision tool_call_parser trust_request_chat_template uds"""
"""Flags of `vllm serve`. Others that Quire lacks are only in the tables of `quire.vllm_settings`."""

METHODS = """
    generate chat enqueue enqueue_chat wait_for_completion beam_search get_tokenizer get_default_sampling_params
    get_metrics get_world_size reset_prefix_cache"""
"""Methods of `LLM`. Others that Quire lacks are only in `quire.vllm_settings.REFUSED_METHODS`."""

SAMPLING_FIELDS = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
    ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
    logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind stream_interval skip_clone structured_outputs logit_bias allowed_token_ids
    bad_words extra_args skip_reading_prefix_cache thinking_token_budget repetition_detection watermarking
    routed_experts_prompt_start trace_decode_token_ids"""

REQUEST_OUTPUT_FIELDS = """
    request_id prompt prompt_token_ids prompt_logprobs prompt_token_id_logprobs outputs finished metrics lora_request
    encoder_prompt encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens kv_transfer_params
    ec_transfer_params"""

COMPLETION_OUTPUT_FIELDS = """
    index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason lora_request sampling_mask
    spec_decode_metrics weight_versions"""

ENDPOINTS = """
    /v1/chat/completions /v1/completions /v1/responses /v1/models /v1/models/{model} /health /ping /version /load
    /metrics /tokenize /detokenize /tokenizer_info /docs /openapi.json /v1/load_lora_adapter /v1/unload_lora_adapter
    /reset_prefix_cache"""

MISSING_ENDPOINTS = {
    "only generation is served": """
        /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
        /generative_scoring""",
    "only text is served": "/v1/audio/transcriptions /v1/audio/translations /v1/realtime /reset_mm_cache",
    "it is another vendor's API": """
        /v1/messages /v1/messages/count_tokens /cohere/v2/chat /cohere/v2/chat/render /invocations /v1/systemone""",
    "one conversation a request; clients send several at once": "/v1/chat/completions/batch",
    "no response is kept": "/v1/responses/{id} /v1/responses/{id}/cancel",
    "a gateway renders and generates; it has neither alone": """
        /v1/chat/completions/render /v1/completions/render /v1/messages/render /v1/responses/render
        /v1/chat/completions/derender /v1/completions/derender /inference/v1/generate""",
    "a client that leaves aborts its request": "/inference/v1/abort_requests /abort_requests",
    "weights and KV stay on the device": """
        /sleep /wake_up /is_sleeping /release_kv_cache_memory /init_weight_transfer_engine /start_weight_update
        /update_weights /finish_weight_update /weight_info""",
    "[draining](deploy.md#draining-and-restarting) is how a part pauses": "/pause /resume /is_paused",
    "engines [join and leave](deploy.md#engines-that-join-and-leave) by themselves": """
        /scale_elastic_ep /is_scaling_elastic_ep""",
    "there is no such feature": """
        /collective_rpc /server_info /get_world_size /start_profile /stop_profile /fault_tolerance/apply
        /fault_tolerance/status /kv_event_sources /reset_encoder_cache""",
    "`/docs` shows the same": "/redoc",
}

METRICS = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc lora_requests_info
    cache_config_info prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source
    prompt_tokens_cached generation_tokens request_success admission_rejections request_prompt_tokens
    request_generation_tokens request_max_num_generation_tokens request_params_max_tokens
    request_prefill_kv_computed_tokens iteration_tokens_total request_params_n request_num_preemptions
    time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds"""
"""Metrics, without `vllm:` before them and the counters' `_total`."""

MISSING_METRICS = {
    "KV in host memory has figures under `quire:host_...`, and is kept nowhere else": """
        external_prefix_cache_* num_requests_kv_fetch_by_stage prompt_tokens_cached_by_source kv_offload_*
        simple_kv_offload_* nixl_* mooncake_* hf3fs_* hisparse_*""",
    "only text is served": "mm_cache_* websocket_*",
    "there is no speculative decoding": "spec_decode_*",
    "weights stay on the device": "engine_sleep_state sleep_mode_* rl_weight_update_*",
    "there is no such feature": "diffusion_* watermark_requests",
    "nothing counts it": "corrupted_requests estimated_* kv_block_* tool_call_parser_invocations",
}
"""`*` stands for the rest of several names."""
