"""Session-wide fixtures: tiny checkpoints, built once, whose predictions are far from uniform."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skirl.runtime.env import prepare_environment
from skirl.testing import tiny_models
from tests import tiny

TOGETHER = {
    "ray": (
        "distributed/test_critic.py",
        "distributed/test_divergence.py",
        "distributed/test_equal_runs.py",
        "distributed/test_ray_calls.py",
        "e2e/test_ppo.py",
        "e2e/test_vllm_runs.py",
    ),
    "vllm": (
        "contract/test_vllm_commits.py",
        "contract/test_vllm_deaths.py",
        "contract/test_vllm_engine.py",
        "contract/test_vllm_lora.py",
    ),
}
"""Files that one process runs where several share the tests: they share a Ray cluster, or an import of vLLM."""
APART = ("contract/test_scorer.py", "e2e/test_families.py", "e2e/test_presets.py", "e2e/test_runs.py")
"""Files whose tests share next to nothing: whichever process is free takes the next one."""

os.environ.setdefault("RAY_worker_niceness", "0")  # 15: beside another busy process Ray's would get next to nothing


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


@pytest.fixture(scope="session")
def start_cluster() -> Iterator[Callable[[], None]]:
    """Starts a Ray cluster of two cores on this machine, where this process has none; it ends with the session."""
    yield _start_cluster
    _end_cluster()


@pytest.fixture
def cluster(start_cluster: Callable[[], None]) -> None:
    """A Ray cluster for the test; each run brings its own processes up and down."""
    start_cluster()


@pytest.fixture(scope="session")
def end_cluster() -> Callable[[], None]:
    """Ends the cluster that ``start_cluster`` started, before one of another kind."""
    return _end_cluster


@pytest.fixture
def no_cluster(end_cluster: Callable[[], None]) -> None:
    """For a run that starts a cluster of its own."""
    end_cluster()


def _start_cluster() -> None:
    import ray

    if not ray.is_initialized():
        prepare_environment()
        ray.init(
            address="local",  # whatever other clusters this machine has
            num_cpus=2,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=512 << 20,
        )


def _end_cluster() -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What ``--dist loadgroup`` means here: whole files, ``TOGETHER`` and ``APART`` apart."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    groups = {f"tests/{file}": name for name, files in TOGETHER.items() for file in files}

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.removeprefix("tests/") in APART else groups.get(file, file)

    return Scheduling(config, log)
