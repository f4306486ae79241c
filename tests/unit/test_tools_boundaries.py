"""tools/check_boundaries.py: what it must flag, and what it must leave alone."""

from pathlib import Path

import pytest

from tools import check_boundaries


def findings(root: Path, place: str, code: str) -> list[str]:
    """Write one file of a package called skirl; the rules it breaks."""
    path = root / "skirl" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return [finding.rule for finding in check_boundaries.check_package(root / "skirl")]


def function(num_lines: int, comment: str = "") -> str:
    return f"def f() -> None:{comment}\n" + "    pass\n" * (num_lines - 1)


FLAGGED = {
    "plain import": ("loop.py", "import ray\n", "ray only at its home"),
    "from import": ("training/worker.py", "from deepspeed import initialize\n", "deepspeed only at its home"),
    "submodule": ("rollouts/router.py", "import vllm.engine\n", "vllm only at its home"),
    "inside a function": ("loop.py", "def f():\n    import ray\n", "ray only at its home"),
    "dynamic import": ("loop.py", "import importlib\nimportlib.import_module('ray.util')\n", "ray only at its home"),
    "member of a module": ("loop.py", "from torch import distributed as d\n", "torch.distributed only at its home"),
    "attribute": ("loop.py", "import torch as t\nt.cuda.synchronize()\n", "torch.cuda only at its home"),
    "deep attribute": ("loop.py", "import torch\ntorch.distributed.barrier()\n", "torch.distributed only at its home"),
    "environment": ("assemble.py", "import os\nos.environ['A'] = '1'\n", "os.environ only at its home"),
    "getenv": ("assemble.py", "from os import getenv\n", "os.getenv only at its home"),
    "tensorboard": ("loop.py", "from torch.utils.tensorboard import X\n", "torch.utils.tensorboard only at its home"),
    "transformers": ("rewards/model.py", "import transformers\n", "transformers only at its home"),
    "sibling of a home": ("rollouts/router.py", "import transformers\n", "transformers only at its home"),
    "torch in settings": ("config/schema.py", "import torch.nn\n", "no torch here"),
    "torch in errors": ("errors.py", "import torch\n", "no torch here"),
    "settings in records": ("records.py", "from skirl.config import Config\n", "no skirl.config here"),
    "relative settings": ("algorithms/kl.py", "from ..config.schema import Config\n", "no skirl.config here"),
    "relative package": ("algorithms/kl.py", "from .. import config\n", "no skirl.config here"),
    "cuda literal": ("models/load.py", "device = 'cuda'\n", '"cuda" only at its home'),
    "cuda index": ("models/load.py", "def f(i: int) -> str:\n    return f'cuda:{i}'\n", '"cuda" only at its home'),
    "cuda method": ("models/load.py", "def f(model):\n    model.cuda()\n", ".cuda() only at its home"),
    "private module": ("runtime/ray/a.py", "from ray._private import x\n", "private API ray._private.x"),
    "private attribute": ("models/a.py", "import transformers as t\nt._x.y()\n", "private API transformers._x.y"),
    "print": ("loop.py", "print('step')\n", "print"),
    "getattr default": ("loop.py", "getattr(config, 'x', 1)\n", "getattr with a default"),
    "getattr, no reason": ("loop.py", "getattr(config, 'x', 1)  # getattr:\n", "getattr with a default"),
    "config.get": ("loop.py", "def f(self):\n    self.config.get('x')\n", "config.get"),
    "bare except": ("loop.py", "try:\n    pass\nexcept:\n    pass\n", "broad except"),
    "broad except": ("loop.py", "try:\n    pass\nexcept Exception as error:\n    pass\n", "broad except"),
    "broad in a tuple": ("loop.py", "try:\n    pass\nexcept (OSError, BaseException):\n    pass\n", "broad except"),
    "broad suppress": ("loop.py", "import contextlib\ncontextlib.suppress(Exception)\n", "broad except"),
    "raises another": ("loop.py", "try:\n    pass\nexcept Exception:\n    raise ValueError\n", "broad except"),
    "reason elsewhere": ("loop.py", "try:  # fence: x\n    pass\nexcept Exception:\n    pass\n", "broad except"),
    "long function": ("loop.py", function(61), "function size"),
    "long excused function": ("loop.py", function(101, "  # size: one table"), "function size"),
    "long file": ("loop.py", "x = 1\n" * 501, "file size"),
    "utils": ("models/utils.py", "", "file name"),
    "utils package": ("models/utils/audio.py", "", "file name"),
    "no docstring": ("config/schema.py", "class A(Frozen):\n    x: int = 1\n", "undocumented setting"),
    "comment only": (
        "config/method.py",
        "class A(Frozen):\n    x: int  # an x\n    y: int\n    '''A y.'''\n",
        "undocumented setting",
    ),
    "empty docstring": ("config/schema.py", "class A(Frozen):\n    x: int\n    ' '\n", "undocumented setting"),
    "syntax": ("loop.py", "def f(:\n", "syntax"),
}

PASSING = {
    "ray at home": ("runtime/ray/workers.py", "import ray\n"),
    "deepspeed at home": ("training/backends/deepspeed.py", "import deepspeed\nimport torch.distributed\n"),
    "vllm at home": ("weights/vllm_worker.py", "from vllm.config import VllmConfig\n"),
    "cuda at home": ("runtime/device.py", "import torch\nname = 'cuda' if torch.cuda.is_available() else 'cpu'\n"),
    "collectives at home": ("weights/transports/nccl.py", "import torch.distributed as dist\n"),
    "environment at home": ("runtime/env.py", "import os\nos.environ.get('A')\n"),
    "transformers at home": ("rollouts/engines/policy.py", "from transformers import GenerationConfig\n"),
    "patches": ("runtime/patches.py", "def f():\n    import vllm._custom_ops as ops\n    ops._x = 1\n"),
    "longer name": ("loop.py", "import raylib\nfrom skirl.rayon import x\n"),
    "own module of that name": ("assemble.py", "from skirl.runtime import ray\nfrom .training import deepspeed\n"),
    "word cuda": ("config/schema.py", "kind = 'cuda_ipc'\ntext = 'needs cuda 13'\n"),
    "docstring": ("loop.py", '"""Runs on cuda, prints nothing: print(x)."""\n'),
    "own private name": ("loop.py", "from skirl.planning.packing import _fit\n"),
    "standard library": ("loop.py", "import os\nos._exit(1)\n"),
    "dunder": ("loop.py", "import numpy\nnumpy.__version__\n"),
    "two-argument getattr": ("loop.py", "getattr(module, name)\n"),
    "excused getattr": ("models/a.py", "x = getattr(hf, 'x', None)  # getattr: only Whisper has it\n"),
    "plain get": ("loop.py", "raw.get('x')\n"),
    "narrow except": ("loop.py", "try:\n    pass\nexcept (OSError, ValueError):\n    pass\n"),
    "tidies up": ("loop.py", "try:\n    pass\nexcept BaseException:\n    close()\n    raise\n"),
    "fence": ("rewards/pool.py", "try:\n    pass\nexcept Exception:  # fence: a user's reward\n    pass\n"),
    "function at the limit": ("loop.py", function(60)),
    "excused function": ("loop.py", function(100, "  # size: one table")),
    "file at the limit": ("loop.py", "x = 1\n" * 500),
    "documented": ("config/schema.py", "class A(Frozen):\n    x: int = 1\n    '''An x.'''\n"),
    "not a field": (
        "config/schema.py",
        "class A(Frozen):\n    model_config = 1\n    _cache: int = 1\n    limit: ClassVar[int] = 3\n",
    ),
    "not settings": ("config/load.py", "@dataclass\nclass A:\n    x: int\nclass B(Protocol):\n    y: int\n"),
    "field elsewhere": ("records.py", "class A(Base):\n    x: int\n"),
}


@pytest.mark.parametrize(("place", "code", "rule"), FLAGGED.values(), ids=FLAGGED.keys())
def test_flagged(tmp_path: Path, place: str, code: str, rule: str) -> None:
    assert findings(tmp_path, place, code) == [rule]


@pytest.mark.parametrize(("place", "code"), PASSING.values(), ids=PASSING.keys())
def test_passing(tmp_path: Path, place: str, code: str) -> None:
    assert findings(tmp_path, place, code) == []


def test_message_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings(tmp_path, "training/worker.py", "x = 1\nimport deepspeed\n")
    monkeypatch.chdir(tmp_path)
    assert check_boundaries.main(["skirl"]) == 1
    place = Path("skirl/training/worker.py")
    want = f"{place}:2: deepspeed only at its home: move this use to training/backends/deepspeed.py\n"
    assert capsys.readouterr().out == want


def test_clean_and_empty_packages(tmp_path: Path) -> None:
    assert findings(tmp_path, "loop.py", "x = 1\n") == []
    assert check_boundaries.main([str(tmp_path / "skirl")]) == 0
    assert check_boundaries.main([str(tmp_path / "nowhere")]) == 2
