"""Session-wide fixtures: tiny checkpoints, built once, whose predictions are far from uniform."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from skirl.testing import tiny_models
from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Checkpoint directories by name (``tiny.BUILDERS``), each built when first asked for. Read only."""
    return tiny.Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-ASR, for whole runs."""
    return tiny_models.tiny_qwen3_asr(tmp_path_factory.mktemp("speech") / "model")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3, for whole runs."""
    return tiny_models.tiny_qwen3(tmp_path_factory.mktemp("text") / "model", tied=True)


@pytest.fixture
def record_property(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """Figures of numpy's types as Python's own: processes that share the tests send each other only those."""

    def record(name: str, value: object) -> None:
        plain = float(value) if isinstance(value, float | np.floating) else value
        record_property(name, int(plain) if isinstance(plain, np.integer) else plain)

    return record


@pytest.fixture(autouse=True)
def _no_log_handlers_left() -> Iterator[None]:
    """A run sets up logging for its process; the next test starts without."""
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.get_name() == "skirl-handler"]:
        root.removeHandler(handler)
        handler.close()
