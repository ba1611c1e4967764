"""`quire bench throughput`: run many prompts at once through the engine in this process."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.arguments import PromptType
from quire.bench.offline import model_id, sampling
from quire.bench.options import ThroughputOptions
from quire.bench.output_files import check_writable, write_json
from quire.bench.workload import Request, RequestGenerator
from quire.llm import LLM


def run(options: ThroughputOptions, settings: Mapping[str, Any]) -> int:
    """Measure, print and save; return the exit status."""
    if options.output_json is not None:
        check_writable("--output-json", options.output_json)
    llm = LLM(**settings, tokenizer=options.tokenizer, seed=options.seed)
    requests = RequestGenerator(options, llm.tokenizer, seed=options.seed).generate()
    if options.num_warmups:
        warmup_options = msgspec.structs.replace(options, num_prompts=max(options.num_warmups, _min_requests(options)))
        warmups = RequestGenerator(warmup_options, llm.tokenizer, seed=options.seed + 1).generate()
        generate(llm, warmups[: options.num_warmups], options)
    started = time.perf_counter()
    input_tokens, output_tokens = generate(llm, requests, options)
    seconds = time.perf_counter() - started
    total_tokens = input_tokens + output_tokens
    print(
        f"Throughput: {len(requests) / seconds:.2f} requests/s, {total_tokens / seconds:.2f} total tokens/s, "
        f"{output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {input_tokens}\nTotal num output tokens:  {output_tokens}")
    if options.output_json is not None:
        record = {
            "model_id": model_id(settings),
            "elapsed_time": seconds,
            "num_requests": len(requests),
            "total_num_tokens": total_tokens,
            "requests_per_second": len(requests) / seconds,
            "tokens_per_second": total_tokens / seconds,
        }
        write_json(options.output_json, record)
    return 0


def generate(llm: LLM, requests: list[Request], options: ThroughputOptions) -> tuple[int, int]:
    """Run the requests. Return the numbers of input and output tokens."""
    prompts: list[PromptType] = [
        request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
        for request in requests
    ]
    params = [sampling(request.output_len, options.n) for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=not options.disable_tqdm)
    output_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return sum(len(output.prompt_token_ids) for output in outputs), output_tokens


def _min_requests(options: ThroughputOptions) -> int:
    return options.prefix_repetition_num_prefixes if options.dataset_name == "prefix_repetition" else 1
