"""What needs two GPUs, by piece; each runs its parts in processes of their own and writes the file after every part.

python -m benchmarks.two_gpus separate --workload text-4B --out results.json [--a.recipe.setting value ...]

separate   policy on one GPU, engine on the other: GRPO steps, weight commits, a plain broadcast of as many bytes
           between the same GPUs, idle share of each GPU
colocate   GRPO steps of one rank and of two (ZeRO-2, ZeRO-3), engines on the same GPUs: speed-up
tensor     one engine over both GPUs: commits to both of its workers by the probe, tokens/s of one and of two GPUs
losses     the same sequences and weights, no sampling: loss and gradient norm of one process and of two ranks

Ratios, which hold across machines, stand under "ratios". A part that fails or runs out of ``--limit`` is noted, and the
others go on. Without GPUs the same runs over gloo and shared memory (``--workload text-tiny``).
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.apart import NO_MULTICAST, answer, apart, begin, end

SEPARATE = "[{roles: [policy], gpus: 1}, {roles: [rollout], gpus: 1}]"
BUSY = {
    "policy": ("time/prepare_s", "time/update_s", "time/commit_s"),
    "rollout": ("time/sample_s", "time/commit_s"),
}
"""Phases of a step in which the GPUs of a role have work, where the two take turns."""

TOLERANCE = {"bfloat16": {"losses": 1e-3, "grad_norms": 1e-2}, "float32": {"losses": 1e-5, "grad_norms": 1e-4}}
"""Largest relative difference of the first step. In bfloat16 ranks add up gradients that were rounded to 8 bits."""

BROADCASTS = 5
MODULE = "benchmarks.two_gpus"


# ----------------------------------------------------------------------------------------------- processes of the parts
@dataclass
class Report:
    """What is known so far; a part that has ended is on disk."""

    out: Path
    limit_s: float
    found: dict[str, Any] = field(default_factory=dict[str, Any])

    def part(self, name: str, child: str, **arguments: Any) -> dict[str, Any] | None:
        """Runs a function of ``CHILDREN`` in a process of its own; None where it failed."""
        began = time.perf_counter()
        with self._log(name) as log:
            result = apart(MODULE, child, arguments, limit_s=self.limit_s, log=log)
        seconds = round(time.perf_counter() - began, 1)
        self.found.setdefault("parts", {})[name] = result | {"part_s": seconds}
        self.write()
        sys.stdout.write(f"{name}: {seconds} s{', FAILED' if 'failed' in result else ''}\n")
        sys.stdout.flush()
        return None if "failed" in result else result

    def write(self) -> None:
        """The file, as far as it goes."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.found, indent=1), encoding="utf-8")

    def _log(self, name: str) -> Any:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        return self.out.with_name(f"{self.out.stem}-{name}.log").open("w", encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- pieces
@dataclass(frozen=True)
class Job:
    """What a piece was asked for.

    Attributes:
        only: parts to run; empty runs all.
    """

    directory: Path
    workload: str
    steps: int
    overrides: tuple[str, ...]
    only: tuple[str, ...]
    gpus: int

    def wants(self, part: str) -> bool:
        """Whether it is to run."""
        return not self.only or part in self.only

    def grpo(self, report: Report, part: str, *settings: str) -> None:
        """GRPO steps with vLLM and these settings. What the caller set comes last and wins."""
        if self.wants(part):
            overrides = ["--rollout.engine", "vllm", *settings, *self.overrides]
            where = str(self.directory)
            report.part(part, "grpo", directory=where, workload=self.workload, steps=self.steps, overrides=overrides)


def separate(report: Report, job: Job) -> dict[str, Any]:
    """Nobody sleeps, weights cross over."""
    over_gloo = [] if job.gpus else ["--rollout.commit.transport", "gloo"]
    job.grpo(report, "run", "--runtime.placement", SEPARATE, *over_gloo)
    run = good(report, "run")
    if run is None:
        return {}
    if job.wants("broadcast"):
        total = int(run["median"]["commit/bytes"])
        report.part("broadcast", "broadcast", total=total, bucket=run["bucket_mb"] << 20, limit_s=report.limit_s / 2)
    idle = [idle_shares(step) for step in run["steps"] if step["step"] > 1]
    ratios: dict[str, Any] = {
        "share_of_step": run["share_of_step"],
        "idle_by_phases": {role: statistics.median(one[role] for one in idle) for role in BUSY} if idle else None,
        "busy_by_nvml": run["busy_by_nvml"],
    }
    plain = good(report, "broadcast")
    if plain is not None:
        commit = run["median"]["commit/gb_per_s"]
        ratios["commit_of_broadcast"] = {how: commit / one["gb_per_s"] for how, one in plain["ways"].items()}
    return ratios


def idle_shares(step: Mapping[str, float]) -> dict[str, float]:
    """Share of a step in which the GPUs of a role have no phase of their own."""
    return {role: 1 - sum(step.get(name, 0.0) for name in names) / step["time/step_s"] for role, names in BUSY.items()}


def colocate(report: Report, job: Job) -> dict[str, Any]:
    """Engines and ranks share the GPUs. Every run has the same prompts, rollouts and micro-batch limit."""
    stage = "--trainer.backend.zero_stage"
    job.grpo(report, "one", "--trainer.ranks", "1", stage, "2")
    job.grpo(report, "zero2", "--trainer.ranks", "2", stage, "2")
    job.grpo(report, "zero3", "--trainer.ranks", "2", stage, "3")
    one = good(report, "one")
    ratios: dict[str, Any] = {}
    for name in ("zero2", "zero3"):
        two = good(report, name)
        if one is not None and two is not None:
            ratios[f"speed_up_{name}"] = {
                phase: one["median"][phase] / two["median"][phase]
                for phase in ("time/step_s", "time/update_s", "time/sample_s", "time/commit_s")
            }
    return ratios


def tensor(report: Report, job: Job) -> dict[str, Any]:
    """One engine of two workers."""
    both = ("--trainer.ranks", "2", "--rollout.engine.tensor_parallel_size", "2")
    job.grpo(report, "run", *both, "--rollout.probe.every", "1")
    for size in (1, 2):
        if job.wants(f"rollouts_{size}"):
            count, new = (1024, 256) if job.gpus else (16, 16)
            model = str(job.directory / "model")
            report.part(f"rollouts_{size}", "rollouts", model=model, count=count, new_tokens=new, size=size)
    ratios: dict[str, Any] = {}
    run, one, two = (good(report, name) for name in ("run", "rollouts_1", "rollouts_2"))
    if run is not None:
        probes = [s["probe/max_logprob_difference"] for s in run["steps"] if "probe/max_logprob_difference" in s]
        ratios["probe_max_logprob_difference"] = probes
        ratios["kl_rollout"] = [s["policy/kl_rollout"] for s in run["steps"] if "policy/kl_rollout" in s]
    if one is not None and two is not None:
        ratios["tokens_per_s_of_one_gpu"] = two["tokens_per_s"] / one["tokens_per_s"]
    return ratios


def losses(report: Report, job: Job) -> dict[str, Any]:
    """Of one rank against two. "plain" is PyTorch in one process, with the very micro-batches of the two ranks."""
    cases = {"one": ("deepspeed", 1, 2), "plain": ("single", 2, 0), "zero2": ("deepspeed", 2, 2),
             "zero3": ("deepspeed", 2, 3)}  # fmt: skip
    for name, (backend, ranks, stage) in cases.items():
        if job.wants(name):
            where = str(job.directory)
            report.part(name, "losses", directory=where, workload=job.workload, backend=backend, ranks=ranks,
                        stage=stage, overrides=list(job.overrides))  # fmt: skip
    one = good(report, "one")
    if one is None:
        return {}
    tolerance = TOLERANCE[one["dtype"]]
    ratios: dict[str, Any] = {"tolerance_of_the_first": tolerance}
    for name in ("plain", "zero2", "zero3"):
        two = good(report, name)
        if two is not None:
            apart_by = {what: [abs(a / b - 1) for a, b in zip(two[what], one[what], strict=True)] for what in tolerance}
            holds = all(apart_by[what][0] <= limit for what, limit in tolerance.items())
            ratios[name] = {**apart_by, "within_tolerance": holds, "speed_up": one["update_s"] / two["update_s"]}
    return ratios


def good(report: Report, name: str) -> Any:
    """A part that was measured, now or before (``--add``)."""
    part = report.found.get("parts", {}).get(name)
    return None if part is None or "failed" in part else part


PIECES: dict[str, Callable[[Report, Job], dict[str, Any]]] = {
    "separate": separate,
    "colocate": colocate,
    "tensor": tensor,
    "losses": losses,
}


# ------------------------------------------------------------------------------------------------------------- children
def child_build(directory: str, workload: str) -> dict[str, Any]:
    """Writes the model; what else is said of the machine is asked here too, so that the parent holds no GPU."""
    import torch
    from torch.cuda import nccl

    from benchmarks.grpo import matmul_tflops, stamp
    from benchmarks.shapes import build

    gpus = torch.cuda.device_count()
    whole = Path(directory) / "parameters"  # written last: the model beside it is whole
    if not whole.exists():
        whole.write_text(str(build(Path(directory), workload)))
    version = ".".join(map(str, nccl.version())) if gpus else None
    peers = [torch.cuda.can_device_access_peer(0, 1)] if gpus > 1 else []
    return {"parameters": int(whole.read_text()), "gpus": gpus, "nccl": version, "peer_access": peers,
            "matmul_tflops": matmul_tflops(), **stamp()}  # fmt: skip


def child_grpo(directory: str, workload: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """GRPO steps, and how busy each GPU was meanwhile."""
    import shutil

    from benchmarks.grpo import measured, read_steps, recipe
    from skirl.config.load import load

    where = Path(directory)
    shutil.rmtree(where / "run", ignore_errors=True)
    config = load(recipe(where, workload, steps), overrides).config
    with Sampled(lambda: len(read_steps(where))) as sampled:
        found = measured(where, workload, steps, overrides)
    trained = [i for i, step in enumerate(found["steps"]) if step["step"] > 1]
    lines = (where / "run").glob("*.log")
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in lines)
    how = [line.partition("weight commits: ")[2] for line in text.splitlines() if "weight commits: " in line]
    return {
        **found, "overrides": list(overrides), "bucket_mb": config.rollout.commit.bucket_mb, "transport": how[-1:],
        "busy_by_nvml": sampled.busy(trained),
    }  # fmt: skip


class Sampled:
    """Utilisation of every GPU each tenth of a second, with the steps done by then; nothing without NVML."""

    def __init__(self, progress: Callable[[], int]) -> None:
        self._progress, self._over = progress, threading.Event()
        self._seen: list[tuple[int, list[int]]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sampled":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
        except (ImportError, OSError) as error:
            sys.stdout.write(f"no NVML: {error}\n")
            return
        except pynvml.NVMLError as error:  # pyright: ignore[reportPossiblyUnboundVariable]
            sys.stdout.write(f"no NVML: {error}\n")
            return
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        while not self._over.wait(0.1):
            now = [int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in handles]
            self._seen.append((self._progress(), now))

    def busy(self, lines: Sequence[int]) -> list[float] | None:
        """Mean share of time with a kernel on it, of each GPU, while these lines of the metrics were under way."""
        kept = [values for line, values in self._seen if line in lines]
        return [statistics.mean(column) / 100 for column in zip(*kept, strict=True)] if kept else None


def child_broadcast(total: int, bucket: int, limit_s: float) -> dict[str, Any]:
    """Two processes, one a GPU; the receiver's figures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    with tempfile.TemporaryDirectory() as name:
        results = [Path(name) / f"{rank}.json" for rank in (0, 1)]
        ranks = [
            begin(
                MODULE,
                "broadcast_rank",
                {"rank": rank, "port": port, "total": total, "bucket": bucket},
                results[rank],
                log=None,
                more={"CUDA_VISIBLE_DEVICES": visible.split(",")[rank]},
            )
            for rank in (0, 1)
        ]
        try:
            until = time.monotonic() + limit_s
            codes = [process.wait(max(until - time.monotonic(), 0.1)) for process in ranks]
        finally:
            for process in ranks:
                end(process)
        assert codes == [0, 0], codes
        return json.loads(results[1].read_text())


def child_broadcast_rank(rank: int, port: int, total: int, bucket: int) -> dict[str, Any]:
    """Rank 0 sends ``total`` bytes: at once, in buckets one after another, and in buckets that are waited for."""
    import torch
    import torch.distributed as dist

    from skirl.runtime import process_groups
    from skirl.runtime.device import collective_backend, pick_device, synchronize

    device = pick_device()
    backend = collective_backend(device)
    process_groups.join(address="127.0.0.1", port=port, rank=rank, num_ranks=2, backend=backend, timeout_s=120)
    whole = torch.full((total,), 1 + rank, dtype=torch.uint8, device=device)
    slots = [torch.full((bucket,), 1 + rank, dtype=torch.uint8, device=device) for _ in range(2)]
    sizes = [min(bucket, total - start) for start in range(0, total, bucket)]

    def buckets(*, wait: bool) -> None:
        for index, size in enumerate(sizes):
            dist.broadcast(slots[index % 2][:size], 0)
            if wait:
                synchronize()

    ways: dict[str, Callable[[], Any]] = {
        "at_once": lambda: dist.broadcast(whole, 0),
        "buckets": lambda: buckets(wait=False),
        "buckets_waited_for": lambda: buckets(wait=True),
    }
    found: dict[str, Any] = {}
    for name, send in ways.items():
        seconds = []
        for _ in range(BROADCASTS + 1):
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            send()
            synchronize()
            seconds.append(time.perf_counter() - start)
        middle = statistics.median(seconds[1:])
        found[name] = {"seconds": middle, "gb_per_s": total / middle / 1e9, "all": seconds}
    assert int(whole.sum(dtype=torch.int64)) == total, "every byte is the sender's"
    process_groups.leave()
    return {"bytes": total, "bucket_bytes": bucket, "backend": backend, "ways": found}


def child_rollouts(model: str, count: int, new_tokens: int, size: int) -> dict[str, Any]:
    """Tokens/s of an engine over ``size`` GPUs."""
    from benchmarks.rollouts import ours

    found = asyncio.run(ours(Path(model), count, tensor_parallel_size=size, new_tokens=new_tokens))
    seconds = found["seconds"]
    return {"tensor_parallel_size": size, "seconds": seconds, "tokens_per_s": count * new_tokens / seconds}


def child_losses(
    *, directory: str, workload: str, backend: str, ranks: int, stage: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Three supervised updates on random sequences that are the same in every case."""
    from benchmarks.grpo import recipe
    from skirl import assemble
    from skirl.config.load import load
    from skirl.runtime.env import prepare_environment
    from skirl.runtime.worker import WorkerSpec
    from skirl.training.objective import SupervisedObjective

    where = Path(directory)
    settings = ["--trainer.ranks", str(ranks), "--trainer.backend", backend]
    settings += ["--trainer.backend.zero_stage", str(stage)] if backend == "deepspeed" else ["--runtime", "local"]
    config = load(recipe(where, workload, 1), [*settings, *overrides]).config
    prepare_environment()
    plan = fixed_plan(where / "model", ranks, config.trainer.max_tokens_per_micro_batch)
    spec = WorkerSpec(config, SupervisedObjective(), 100, with_reference=False, samples=False)
    with assemble.started(spec, "train", None) as workers:
        reports = [workers.update(plan, index + 1) for index in range(3)]
    return {
        "losses": [loss for report in reports for loss in report.losses],
        "grad_norms": [norm for report in reports for norm in report.grad_norms],
        "update_s": reports[-1].seconds, "dtype": config.model.dtype, "plan": plan.hash,
        "tokens": sum(s.num_tokens for s in plan.sequences), "overrides": [*settings, *overrides],
    }  # fmt: skip


def fixed_plan(model: Path, ranks: int, max_tokens: int) -> Any:
    """Sequences of different lengths that fill some four micro-batches."""
    import numpy as np

    from skirl.planning.schedule import make_plan
    from skirl.records import TrainingSequence

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    longest, draw = min(max_tokens // 16, 1024), np.random.default_rng(0)
    lengths = draw.integers(longest // 4, longest + 1, 6 * max_tokens // longest)
    sequences = [
        TrainingSequence(f"{i}", draw.integers(0, vocabulary, length), np.arange(length // 5, length))
        for i, length in enumerate(lengths)
    ]
    return make_plan(sequences, num_ranks=ranks, max_tokens=max_tokens, normalizer="token")


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "broadcast": child_broadcast,
    "broadcast_rank": child_broadcast_rank,
    "build": child_build,
    "grpo": child_grpo,
    "losses": child_losses,
    "rollouts": child_rollouts,
}


# ----------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    """Runs a piece."""
    if answer(CHILDREN):
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see ``answer``
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--workload", default="text-0.6B", help="a name of benchmarks/shapes.py, or text-tiny")
    parser.add_argument("--steps", type=int, default=3, help="the first, which compiles, is left out of the medians")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a part")
    parser.add_argument("--only", default="", help="parts to run, with commas between")
    parser.add_argument("--add", action="store_true", help="keep the parts that --out holds")
    parser.add_argument("--directory", type=Path, help="where the model is, or is built; default: a temporary one")
    parser.add_argument("--out", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    report = Report(options.out, options.limit)
    if options.add and options.out.exists():
        report.found = json.loads(options.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        directory: Path = options.directory or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        built = report.part("build", "build", directory=str(directory), workload=options.workload)
        if built is None:
            sys.exit(report.found["parts"]["build"]["output"])
        if built["gpus"] == 1:
            sys.exit("one GPU is visible: this takes two, or none for a trial on CPUs")
        only = tuple(filter(None, options.only.split(",")))
        job = Job(directory, options.workload, options.steps, tuple(overrides), only, built["gpus"])
        ratios = PIECES[options.piece](report, job)
    report.found = {"piece": options.piece, "workload": options.workload, "ratios": ratios,
                    "environment": NO_MULTICAST, **report.found}  # fmt: skip
    report.found["ratios"] = ratios
    report.write()
    sys.stdout.write(json.dumps({"piece": options.piece, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
