"""runtime/patches.py: what stands in for torchvision. (The other patches are proved by the engine's tests.)"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = "from skirl.runtime import patches; patches._do_without_torchvision(); patches._do_without_torchvision(); "
BROKEN = """
import torch
@torch.library.register_fake("torchvision::nms")  # as the CUDA build does, which registers it from a library
def nms(dets, scores, iou_threshold):
    return dets
from torchvision import ops
"""


def run(code: str, *paths: Path) -> str:
    path = os.pathsep.join([*map(str, paths), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_an_absent_torchvision_can_be_imported_and_not_used():
    code = PREPARE + (
        "from torchvision.transforms.v2 import functional as f\n"
        "from transformers.utils.import_utils import is_torchvision_available as available\n"
        "try: f.resize\n"
        "except AttributeError as error: print(error, '|', available())\n"
        "try: from torchvision.ops import nms\n"
        "except ImportError: print('no ops')"
    )
    expected = "torchvision.transforms.v2.functional.resize: torchvision is not installed, and images need it | False"
    assert run(code).splitlines() == [expected, "no ops"]


def test_a_torchvision_of_another_build_gets_its_operators(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    (package / "ops.py").write_text("")
    failing = "try: import torchvision\nexcept RuntimeError as error: print(error)"
    assert run(failing, tmp_path) == "operator torchvision::nms does not exist"
    assert run(PREPARE + "import torchvision; print(torchvision.ops.__name__)", tmp_path) == "torchvision.ops"
