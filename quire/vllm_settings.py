"""Tables of vLLM's settings that Quire does not have, or has under another name. `quire.vllm` says what they mean.

They hold the settings of vLLM 0.32, and some of older versions that scripts still use.
"""

SHORT_FLAGS: dict[str, str] = {
    "-q": "quantization",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-asc": "api-server-count",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-O": "optimization-level",
}
"""vLLM's short flags, and the names that they stand for."""

RENAMED: dict[str, str] = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "kv_offloading_size": "swap_space",
    "device_memory_utilization": "gpu_memory_utilization",
    "shutdown_timeout": "drain_timeout",
    "uvicorn_log_level": "log_level",
}
"""vLLM's name of a setting, and Quire's."""

RENAMED_VALUES: dict[str, dict[str, str]] = {
    "quantization": {"gptq_marlin": "gptq", "awq_marlin": "awq"},
    "kv_cache_dtype": {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8"},
    "load_format": {"hf": "auto"},
    "model_impl": {"vllm": "quire"},
    "log_level": {"trace": "debug", "notset": "debug"},
    "tool_call_parser": {"llama4_json": "llama3_json"},
    "reasoning_parser": {"": "auto", "deepseek_v3": "qwen3", "glm47": "glm45"},
}
"""vLLM's and Quire's names of a value, by Quire's name of the setting."""

VARIABLES: dict[str, str] = {
    "VLLM_API_KEY": "QUIRE_API_KEY",
    "VLLM_BATCH_INVARIANT": "QUIRE_BATCH_INVARIANT",
    "VLLM_SERVER_DEV_MODE": "QUIRE_ENABLE_RESET_PREFIX_CACHE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "QUIRE_ENABLE_LORA_RUNTIME_UPDATES",
}
"""vLLM's environment variables that are read, and Quire's that they stand for."""

COUNTS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_num_queued_tokens", "max_num_queued_reqs")
"""Settings that may be written as `32k` (32,000) or `32K` (32,768), as in vLLM."""

ACCEPTED: dict[str, str] = {
    "decodes run in CUDA graphs unless --enforce-eager is set; nothing is compiled while serving": """
        compilation_config optimization_level performance_mode cudagraph_capture_sizes
        max_cudagraph_capture_size max_seq_len_to_capture cuda_graph_sizes enable_flashinfer_autotune!
        jit_monitor_mode jit_monitor_verbose! disable_frontend_multiprocessing!""",
    "code that comes with a model is never executed; a model that needs it is refused when it is loaded": """
        trust_remote_code! code_revision""",
    "a request without a seed is given one; its own seed makes a request repeatable": "seed",
    "Quire has one implementation of it on each device": """
        attention_backend attention_config moe_backend linear_backend kernel_config ir_op_priority
        sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend
        use_v2_block_manager! disable_cascade_attn! enable_cumem_allocator! disable_hybrid_kv_cache_manager!
        prefix_caching_hash_algo safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size pt_load_map_location max_parallel_loading_workers use_tqdm_on_load!
        ignore_patterns allow_deprecated_quantization! renderer_num_workers multi_step_stream_outputs!
        guided_decoding_backend structured_outputs_config""",
    "the ranks of an engine are processes that `quire serve` starts and that meet by themselves": """
        distributed_executor_backend worker_use_ray! engine_use_ray! master_addr master_port
        distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind! numa_bind_nodes numa_bind_cpus
        data_parallel_address data_parallel_rpc_port data_parallel_backend data_parallel_supervisor_port
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold
        ray_workers_use_nsight!""",
    "ranks divide the heads and the widths of each layer in one way": """
        dcp_comm_backend dcp_q_replicate! dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
        enable_expert_parallel! enable_batch_sharded_sampling! enable_ep_weight_filter! all2all_backend enable_dbo!
        ubatch_size enable_shm_tensor_arena! dbo_decode_token_threshold dbo_prefill_token_threshold
        dp_sync_interval disable_nccl_for_dp_synchronization! enable_eplb! eplb_config expert_placement_strategy
        disable_custom_all_reduce! enable_nccl_comm_suspend! enable_hc_sp!""",
    "workers and schedulers that die are always replaced": "enable_fault_tolerance! fault_tolerance_config",
    "only text is served": """
        language_model_only! limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only!
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings!
        skip_mm_profiling! video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize! disable_chunked_mm_input! trust_request_mm_kwargs!
        allowed_local_media_path allowed_media_domains""",
    "adapters are computed in the model's dtype, on one device, and for generation only": """
        lora_dtype lora_extra_vocab_size fully_sharded_loras! enable_tower_connector_lora! specialize_active_lora!
        enable_mixed_moe_lora_format! enable_moe_shared_loras! max_lora_cls_labels""",
    "there are no recurrent layers": """
        mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding! mamba_cache_philox_rounds
        mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint! replayssm_buffer_len use_replayssm!""",
    "it is a hint to vLLM's scheduler; Quire's has rules of its own": """
        long_prefill_token_threshold long_prefill_token_threshold_adaptive! max_num_scheduled_tokens
        max_num_active_seqs watermark scheduler_reserve_full_isl! prefill_schedule_interval
        max_num_partial_prefills max_long_partial_prefills num_scheduler_steps num_lookahead_slots
        scheduler_delay_factor max_paddings disable_async_output_proc! kv_offloading_backend
        kv_sharing_fast_prefill! swa_bounded_replay! prefix_cache_retention_interval prefix_match_unit""",
    "there is no such line in the log; figures are at /metrics": """
        disable_log_stats! aggregate_engine_logging! enable_logging_iteration_details! log_error_stack!""",
    "requests are logged only with --enable-log-requests, and their texts never": """
        disable_log_requests! disable_uvicorn_access_log! disable_access_log_for_endpoints max_log_len
        enable_log_outputs! enable_log_deltas!""",
    "a parser of tool calls that fits the model is used without it": "enable_auto_tool_choice!",
    "it is always so": """
        enable_request_id_headers! enable_prompt_tokens_details! fail_on_environ_validation! enable_offline_docs!
        enable_server_load_tracking!""",
    "there are no such pages, figures or fields": """
        show_hidden_metrics_for_version kv_cache_metrics! kv_cache_metrics_sample cudagraph_metrics!
        enable_mfu_metrics! enable_layerwise_nvtx_tracing! per_request_spec_decode_metrics fingerprint_mode
        fingerprint_value enable_flash_late_interaction! cohere_is_reasoning_model! cohere_format
        anthropic_disabled_thinking_effort tool_strict_level""",
    "a request's head may have 64 KiB": "h11_max_incomplete_event_size h11_max_header_count",
}
"""Settings that are accepted with any value, by the reason. `!` marks switches."""

REFUSED: dict[str, str] = {
    "a sequence's context is not divided among ranks": """
        decode_context_parallel_size=1 prefill_context_parallel_size=1""",
    "`quire serve` starts the ranks of this machine; docs/parallel.md shows how those of others are started": """
        nnodes=1 node_rank=0""",
    "CUDA_VISIBLE_DEVICES names the GPUs": "device_ids",
    "engines of `quire serve` are all on this machine; `--engines` of a gateway names those of other machines": """
        data_parallel_size_local=1 data_parallel_rank=0 data_parallel_start_rank=0 data_parallel_hybrid_lb!
        data_parallel_external_lb! data_parallel_multi_port_external_lb! enable_elastic_ep! elastic_ep_max_dp_size""",
    "a scheduler and its worker alone are started as processes of their own": "headless!",
    "an adapter's own adapter_config.json says what it changes": "lora_target_modules",
    "only text is served": "default_mm_loras",
    "parsers of tool calls and reasoning are Quire's own": "tool_parser_plugin reasoning_parser_plugin",
    "tools are called by the client": "tool_server",
    "the tokens that mark reasoning are those of --reasoning-parser": "reasoning_config",
    "there is no speculative decoding": "speculative_config spec_method spec_model spec_tokens speculative_model",
    "there is no transfer of KV between engines": """
        kv_transfer_config kv_events_config ec_transfer_config ec_manager_config weight_transfer_config""",
    "the model is computed as its config.json says": """
        hf_config_path hf_overrides={} model_class_overrides={} rope_scaling rope_theta quantization_config
        disable_sliding_window! config_format=auto|hf kv_cache_dtype_skip_layers=[] calculate_kv_scales!
        quantization_param_path model_loader_extra_config={} additional_config={}""",
    "weights stay on the device": """
        cpu_offload_gb=0 offload_backend=auto cpu_offload_params offload_params offload_group_size=0
        offload_num_in_group=1 offload_prefetch_step=1 enable_sleep_mode! sleep_mode_offload_cudagraph!
        sleep_preserve_parameter_names=[]""",
    "only generation is served": "runner=auto|generate convert=auto|none task=auto|generate pooler_config",
    "requests are texts, token ids and messages": """
        skip_tokenizer_init! enable_prompt_embeds! enable_mm_embeds! tokens_only! io_processor_plugin
        enable_scale_out!""",
    "tokenizers are read from tokenizer.json, or made into that": "tokenizer_mode=auto|hf|fast",
    "classes of the user are not loaded": """
        scheduler_cls worker_cls=auto worker_extension_cls logits_processors middleware=[] logits_processor_pattern""",
    "answers have OpenAI's shape": """
        response_role=assistant return_tokens_as_token_ids! return_sampling_mask! enable_return_routed_experts!
        enable_per_request_metrics! aux_output_config""",
    "log-probabilities are the model's own": "logprobs_mode=raw_logprobs use_fp64_gumbel!",
    "prompts are always computed in chunks, together with running sequences": "enable_chunked_prefill!=true",
    "the gateway speaks plain HTTP; put TLS before it": """
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers ssl_cert_reqs=0 enable_ssl_refresh!""",
    "there is no gRPC": "grpc! grpc_port",
    "there are no such endpoints or records": """
        collect_detailed_traces profiler_config custom_histogram_buckets enable_trace_replay! log_config_file
        logging_config""",
    "there is no such feature": "engram_config diffusion_config watermark_config",
}
"""Settings that are accepted only with the values after `=` (without `=`: only if unset), by the reason."""

REFUSED_METHODS: dict[str, str] = {
    "only generation is served; SamplingParams(prompt_logprobs=0, max_tokens=1) scores a text": """
        encode embed classify score reward""",
    "weights and KV stay on the device; close() frees both": """
        sleep wake_up release_kv_cache_memory""",
    "workers run no code of the caller's": "collective_rpc apply_model",
    "all runs in this process, so torch.profiler sees it": "start_profile stop_profile",
    "weights are those of the model's files": """
        init_weight_transfer_engine start_weight_update update_weights finish_weight_update""",
    "prompts are made in generate and chat": "preprocess preprocess_chat set_tokenizer",
    "only text is served": "reset_mm_cache",
    "LLM takes these arguments itself": "from_engine_args",
}
"""Methods of vLLM's `LLM` that are not there, by the reason."""

LIST_FLAGS = frozenset(
    """
    cudagraph_capture_sizes cuda_graph_sizes middleware logits_processors device_ids numa_bind_nodes
    numa_bind_cpus allowed_media_domains ignore_patterns kv_cache_dtype_skip_layers sleep_preserve_parameter_names
    lora_target_modules custom_histogram_buckets collect_detailed_traces cpu_offload_params offload_params
    """.split()  # noqa: SIM905  (a list would have one name a line)
)
"""Flags that take several values."""
