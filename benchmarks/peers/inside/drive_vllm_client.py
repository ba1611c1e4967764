"""Keeps vLLM's `bench serve` loaded, since its import takes long: each job has the flags of one call."""

import sys
import traceback
from collections.abc import Mapping
from typing import Any

from jobs import Answer, answer
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def load() -> Answer:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)

    def work(job: dict[str, Any]) -> Mapping[str, Any]:
        try:
            main(parser.parse_args(job["flags"]))
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sys.stderr)
            return {"error": repr(error)}
        return {"error": ""}

    return work


if __name__ == "__main__":
    answer(load)
