"""The demo: a tiny Qwen3-ASR learns to transcribe spoken digits, then GRPO adapts it to a harder domain.

    random weights -> skirl sft (clean speech) -> skirl train (GRPO on noisy speech, Ray + DeepSpeed) -> hf/step-*

Two CPU cores are enough. The two skirl commands are those a user would type; ``--seed`` and ``--dir`` allow repeats.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

DATA = Path("demo/data")


def words() -> list[str]:
    """What the tokenizer learns to write as single tokens: digits of both languages and the words of the tags."""
    found: set[str] = set()
    for manifest in sorted(DATA.glob("*.jsonl")):
        for line in manifest.read_text(encoding="utf-8").splitlines():
            tag, _, text = json.loads(line)["text"].partition("<asr_text>")
            found.add(tag)
            pieces = text.split() if tag.endswith("English") else list(text)
            found |= set(pieces) | ({f" {piece}" for piece in pieces} if tag.endswith("English") else set())
    return sorted(found)


def build(directory: Path) -> None:
    """Writes the random starting model."""
    from skirl.testing.tiny_models import tiny_qwen3_asr

    tiny_qwen3_asr(directory, hidden=128, texts=words(), initializer_range=0.04)


def skirl(*arguments: str) -> float:
    """Runs one command as a user would; returns its seconds."""
    sys.stdout.write(f"\n$ skirl {shlex.join(arguments)}\n")
    sys.stdout.flush()
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "skirl", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return time.perf_counter() - start


def table(run: Path) -> str:
    """What GRPO changed, as a Markdown table."""
    lines = ["| held out | before GRPO | after | difference | 95 % interval |", "|---|---|---|---|---|"]
    for row in json.loads((run / "eval" / "comparison.json").read_text(encoding="utf-8")):
        before, after, difference, low, high = (100 * row[k] for k in ("before", "after", "value", "low", "high"))
        lines.append(
            f"| {row['label']}: CER % | {before:.1f} | {after:.1f} | {difference:+.1f} | {low:+.1f} .. {high:+.1f} |"
        )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [step["reward/mean"] for step in steps if "reward/mean" in step]
    first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
    return "\n".join(
        [*lines, f"| sampled reward, first and last 5 steps | {first:.3f} | {last:.3f} | {last - first:+.3f} | |"]
    )


def phases(run: Path) -> str:
    """Seconds of each phase of the run."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = next(event["seconds"] for event in reversed(events) if event["kind"] == "closed")
    return ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())


def main() -> None:
    """Builds the model, runs both stages, transcribes one held-out clip with the export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="where the demo writes; emptied first")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs")
    options = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"demo: {DATA} is not here; start it from the root of the repository")
    shutil.rmtree(options.dir, ignore_errors=True)
    start = time.perf_counter()
    build(options.dir / "init")
    seed = ["--run.seed", str(options.seed)]
    sft_dir, grpo_dir = options.dir / "sft", options.dir / "grpo"
    paths = ["--model.path", str(options.dir / "init"), "--run.dir", str(sft_dir)]
    sft = skirl("sft", "recipes/demo-sft.yaml", *paths, *seed)
    exported = max((sft_dir / "hf").glob("step-*"))
    train = skirl("train", "recipes/demo-grpo.yaml", "--model.path", str(exported), "--run.dir", str(grpo_dir), *seed)
    final = max((grpo_dir / "hf").glob("step-*"))
    sys.stdout.write(f"\n$ python demo/transcribe.py {final}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "demo/transcribe.py", str(final)], check=True)
    total = time.perf_counter() - start
    sys.stdout.write(f"\n{table(grpo_dir)}\n\nmodel: {final}\n")
    sys.stdout.write(
        f"seconds: {total:.0f} in all; skirl sft {sft:.0f}, skirl train {train:.0f} ({phases(grpo_dir)})\n"
    )


if __name__ == "__main__":
    main()
