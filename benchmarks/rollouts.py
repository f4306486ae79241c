"""Sampled tokens a second of skirl's engine, as a share of vLLM's own ``LLM.generate``.

python benchmarks/rollouts.py --workload text-4B --out results.json

1,024 sequences x (128 prompt + 256 new) tokens, the same engine arguments on both sides, each in a process of its own,
one warm-up before the measured pass. ``raw`` returns token ids alone, ``raw_logprobs`` their log-probs too, and
``ours`` what training needs: ids, log-probs, versions, texts. ``caller_busy``: processor seconds of the process that
asks, a second; near 1 it is what holds the engine back.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.grpo import stamp
from benchmarks.shapes import SHAPES, build

PROMPT_TOKENS, NEW_TOKENS = 128, 256
ARGUMENTS = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}


def prompts(count: int) -> list[list[int]]:
    """Random token ids of the small tokenizer."""
    draw = random.Random(0)
    return [[draw.randrange(3, 250) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Clock:
    """Seconds since it was made, and how busy this process was."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Seconds, and processor seconds of this process a second."""
        seconds = time.perf_counter() - self._start
        return {"seconds": seconds, "caller_busy": (time.process_time() - self._busy) / seconds}


def raw(model: Path, count: int) -> dict[str, dict[str, float]]:
    """LLM.generate without log-probs and with them."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(model), dtype="bfloat16", max_model_len=PROMPT_TOKENS + NEW_TOKENS, gpu_memory_utilization=0.6, **ARGUMENTS
    )
    found = {}
    for side, logprobs in (("raw", None), ("raw_logprobs", 0)):
        sampling = SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        for seed in (0, 1):
            asked = [{"prompt_token_ids": ids[seed:] + ids[:seed]} for ids in prompts(count)]
            clock = Clock()
            outputs = engine.generate(asked, sampling, use_tqdm=False)
            found[side] = clock.read()
            assert sum(len(o.outputs[0].token_ids) for o in outputs) == count * NEW_TOKENS
    return found


async def ours(
    model: Path, count: int, *, tensor_parallel_size: int = 1, new_tokens: int = NEW_TOKENS
) -> dict[str, float]:
    """Skirl's engine, groups of 8 as the router hands them over."""
    from skirl.records import Prompt, Request, Sampling
    from skirl.rollouts.engines.vllm import EngineSpec, VLLMEngine
    from skirl.runtime.device import has_gpu

    spec = EngineSpec(
        model_path=str(model),
        dtype="bfloat16" if has_gpu() else "float32",
        seed=0,
        tensor_parallel_size=tensor_parallel_size,
        arguments=ARGUMENTS,
        enable_sleep=False,
        gpu_memory_utilization=0.6,
        max_model_len=PROMPT_TOKENS + new_tokens,
        placeholder=None,
        max_in_flight=count,
        load_format="auto",
    )
    engine = VLLMEngine(spec, None)
    await engine.start()
    sampling = Sampling(max_new_tokens=new_tokens)
    found: dict[str, float] = {}
    for seed in (0, 1):
        made = [
            Prompt(
                f"p/{i}", "p", tuple(ids[seed:] + ids[:seed]), tuple(ids[seed:] + ids[:seed]), (), None, None, None, {}
            )
            for i, ids in enumerate(prompts(count))
        ]
        requests = [Request(p, 0, i, sampling) for i, p in enumerate(made)]
        groups = [requests[i : i + 8] for i in range(0, count, 8)]

        async def drain(group: list[Request]) -> int:
            return sum([len(rollout.response_ids) async for rollout in engine.generate(group)])

        clock = Clock()
        tokens = sum(await asyncio.gather(*map(drain, groups)))
        found = clock.read()
        assert tokens == count * new_tokens, tokens
    await engine.shutdown()
    return found


def main() -> None:
    """Both sides, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="text-4B", choices=[*SHAPES, "text-tiny"])
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=["raw", "ours"])
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.side:
        if options.side == "raw":
            sides = raw(options.model, options.count)
        else:
            sides = {"ours": asyncio.run(ours(options.model, options.count))}
        sys.stdout.write(f"\nFOUND {json.dumps(sides)}\n")
        return
    with tempfile.TemporaryDirectory() as name:
        build(Path(name), options.workload)
        found: dict[str, dict[str, float]] = {}
        for side in ("raw", "ours"):
            command = [sys.executable, "-m", "benchmarks.rollouts", "--side", side, "--model", f"{name}/model"]
            done = subprocess.run(
                [*command, "--count", str(options.count)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{side} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
            found |= json.loads(done.stdout.split("FOUND ")[1].partition("\n")[0])
    rates = {side: options.count * NEW_TOKENS / times["seconds"] for side, times in found.items()}
    result = {
        "workload": options.workload, "tokens_per_s": rates, "ours_of_raw": rates["ours"] / rates["raw"],
        "caller_busy": {side: times["caller_busy"] for side, times in found.items()},
        "arguments": ARGUMENTS, "sequences": options.count, **stamp(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
