"""Runs vLLM's own load generator, `vllm bench serve`, and prints what it measured as one line of JSON per run.

Usage, in vLLM's venv: python bench.py TOKENIZER BACKEND ENDPOINT URL AT_ONCE PROMPTS [...]

One process makes all the runs, as the imports take longer than a run.
"""

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

SIZE = (
    "--dataset-name random --random-input-len 64 --random-output-len 32 --ignore-eos --temperature 0 --seed 1"
    " --disable-tqdm"
).split()


def run(tokenizer: str, backend: str, endpoint: str, url: str, at_once: str, prompts: str) -> dict:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    target = ["--model", "tiny", "--tokenizer", tokenizer, "--backend", backend, "--endpoint", endpoint, "--base-url", url]
    load = ["--max-concurrency", at_once, "--num-prompts", prompts]
    return main(parser.parse_args(target + load + SIZE))


if __name__ == "__main__":
    protocol, sys.stdout = sys.stdout, sys.stderr  # it prints a table
    tokenizer, *rest = sys.argv[1:]
    for start in range(0, len(rest), 5):
        result = run(tokenizer, *rest[start : start + 5])
        numbers = {name: value for name, value in result.items() if not isinstance(value, list)}
        print(json.dumps(numbers), file=protocol, flush=True)
