"""Tiny models of the runs below."""

from pathlib import Path

import pytest
import torch

from skirl.testing.tiny_models import tiny_qwen3, tiny_qwen3_asr


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-ASR."""
    return tiny_qwen3_asr(tmp_path_factory.mktemp("speech") / "model")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3."""
    return tiny_qwen3(tmp_path_factory.mktemp("text") / "model", tied=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Ray gives a rank one thread; the local runs that it is compared with get one too."""
    torch.set_num_threads(1)
