"""Milliseconds that vLLM's two processes spend on the outputs of one step, by how log-probs travel.

python benchmarks/engine_outputs.py --out results.json [--requests 1024]

No engine and no model: the outputs of a step in which every request gets one token go through vLLM's own scheduler
loop (what it does with log-probs), encoder, decoder and output processor. "arrays" is vLLM's way, "numbers" skirl's
(ADR 0015), "none" a request without log-probs. Ratios, which hold across machines: each form to "none".
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.grpo import installed
from skirl.rollouts.engines.vllm_scheduler import SendsNumbers, collect_numbers


class Scheduler:
    """The part of vLLM's that deals out log-probs."""

    def update_from_output(self, rows: int, ran: Any) -> dict[int, Any]:
        """One output a row."""
        made = [
            EngineCoreOutput(f"r{i}", [5], new_logprobs=ran.logprobs.slice_request(i, 1) if ran.logprobs else None)
            for i in range(rows)
        ]
        return {0: EngineCoreOutputs(outputs=made)}


class Numbers(SendsNumbers, Scheduler):
    """As ``NumberScheduler`` is made."""


def milliseconds(work: Callable[[], Any], times: int = 40) -> float:
    """Median of one call."""
    found = []
    for _ in range(times + 3):
        start = time.perf_counter()
        work()
        found.append((time.perf_counter() - start) * 1e3)
    return sorted(found[3:])[times // 2]


def processor(rows: int, *, logprobs: bool) -> OutputProcessor:
    """With ``rows`` requests under way, as skirl makes them."""
    made = OutputProcessor(None, log_stats=False)
    params = SamplingParams(
        max_tokens=10**6, detokenize=False, logprobs=0 if logprobs else None, flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    for i in range(rows):
        request = EngineCoreRequest(f"r{i}", [1, 2], None, params, None, 0.0, None, None, None, external_req_id=f"{i}")
        made.add_request(request, None, queue=RequestOutputCollector(params.output_kind, f"r{i}"))
    return made


def measure(form: str, rows: int) -> dict[str, float]:
    """Milliseconds a step in the engine's process and in its caller's."""
    draw = np.random.default_rng(0)
    values = LogprobsLists(
        draw.integers(0, 99, (rows, 1), np.int32), draw.random((rows, 1), np.float32), np.ones(rows, np.int32)
    )
    scheduler = Numbers() if form == "numbers" else Scheduler()
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    found = processor(rows, logprobs=form != "none")
    flights = {f"{i}": SimpleNamespace(logprobs=list[float]()) for i in range(rows)}
    if form == "numbers":
        collect_numbers(found, flights)

    def engine() -> Any:
        ran = SimpleNamespace(logprobs=None if form == "none" else values)
        return encoder.encode(scheduler.update_from_output(rows, ran)[0])

    sent = engine()

    def caller() -> None:
        found.process_outputs(decoder.decode(sent).outputs)

    result = {"engine_ms": milliseconds(engine), "caller_ms": milliseconds(caller)}
    if form == "numbers":
        np.testing.assert_array_equal(
            [f.logprobs[0] for f in flights.values()], values.logprobs[:, 0].astype(np.float64)
        )
    return result


def main() -> None:
    """All forms, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    forms = {form: measure(form, options.requests) for form in ("none", "arrays", "numbers")}
    ratios = {f: {k: v / forms["none"][k] for k, v in forms[f].items()} for f in ("arrays", "numbers")}
    result = {
        "requests": options.requests, "forms": forms, "ratio_to_none": ratios, "vllm": installed("vllm"),
        "python": platform.python_version(), "processor": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
