"""Fixtures of the tests that run a vLLM engine."""

import pytest

from tests import engine_process, tiny
from tests.engine_process import EngineProcess


@pytest.fixture(scope="module")
def models(checkpoints):
    tiny.BUILDERS.update(engine_process.BUILDERS)
    return checkpoints


@pytest.fixture(scope="module")
def process():
    """One engine after another in one process, as ``import vllm`` takes most of a start."""
    process = EngineProcess()
    yield process
    process.close()
