"""Session-wide fixtures: tiny checkpoints, built once, whose predictions are far from uniform."""

import pytest
import torch

from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Checkpoint directories by name (``tiny.BUILDERS``), each built when first asked for. Read only."""
    return tiny.Checkpoints(tmp_path_factory.mktemp("checkpoints"))
