"""Placements and the transports that they allow."""

import pytest

from skirl.errors import ConfigError
from skirl.weights.choose import choose_transport
from skirl.weights.endpoints import Place


def cpus(node: str, count: int = 1) -> list[Place]:
    return [Place(node, None)] * count


def gpus(node: str, *numbers: int) -> list[Place]:
    return [Place(node, f"GPU-{node}-{number}") for number in numbers]


CPU_ONE_NODE = (cpus("a", 2), [cpus("a"), cpus("a")])
CPU_TWO_NODES = (cpus("a", 2), [cpus("a"), cpus("b")])
COLOCATED = (gpus("a", 0, 1), [gpus("a", 0), gpus("a", 1)])
SEPARATE = (gpus("a", 0, 1), [gpus("a", 2, 3)])
OTHER_NODE = (gpus("a", 0, 1), [gpus("b", 0, 1)])
MIXED = (gpus("a", 0, 1), [gpus("a", 1), gpus("a", 2), gpus("a", 3)])
GPU_AND_CPU = (gpus("a", 0), [cpus("a")])


@pytest.mark.parametrize(
    ("placement", "name", "reason"),
    [
        (CPU_ONE_NODE, "shared_memory", "all are on a"),
        (CPU_TWO_NODES, "gloo", "1 of 2 engine workers are not on a"),
        (COLOCATED, "cuda_ipc", "all 2 engine workers are on GPUs of training ranks"),
        (SEPARATE, "nccl", "none of the 2 engine workers"),
        (OTHER_NODE, "nccl", "none of the 2 engine workers"),
        (GPU_AND_CPU, "shared_memory", "not every process has a GPU"),
    ],
)
def test_auto(placement, name, reason) -> None:
    choice = choose_transport(*placement, "auto")
    assert choice.name == name
    assert reason in choice.reason
    assert "\n" not in choice.reason


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        (CPU_ONE_NODE, "shared_memory"),
        (CPU_ONE_NODE, "gloo"),
        (CPU_TWO_NODES, "gloo"),
        (COLOCATED, "cuda_ipc"),
        (COLOCATED, "shared_memory"),
        (SEPARATE, "nccl"),
        (SEPARATE, "gloo"),
        (MIXED, "gloo"),
    ],
)
def test_requested(placement, name) -> None:
    assert choose_transport(*placement, name).name == name


@pytest.mark.parametrize(
    ("placement", "requested", "message"),
    [
        (MIXED, "auto", r"1 of 3 engine workers are on GPUs of training ranks, 2 are on others"),
        (MIXED, "cuda_ipc", r"cuda_ipc needs .* 2 of 3 are not"),
        (SEPARATE, "cuda_ipc", r"2 of 2 are not"),
        (CPU_ONE_NODE, "cuda_ipc", r"2 of 2 are not"),
        (OTHER_NODE, "cuda_ipc", r"2 of 2 are not"),
        (COLOCATED, "nccl", r"nccl works between different GPUs only; 2 of 2"),
        (MIXED, "nccl", r"1 of 3"),
        (GPU_AND_CPU, "nccl", r"nccl needs a GPU for every"),
        (CPU_TWO_NODES, "shared_memory", r"one machine only; 1 of 2 engine workers are not on a"),
        (OTHER_NODE, "shared_memory", r"2 of 2"),
    ],
)
def test_refused_with_numbers(placement, requested, message) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_transport(*placement, requested)


@pytest.mark.parametrize("requested", ["auto", "cuda_ipc", "shared_memory"])
def test_asynchronous_training_needs_gpus_of_its_own(requested) -> None:
    with pytest.raises(ConfigError, match=r"2 of 2 engine workers .*asynchronous"):
        choose_transport(*COLOCATED, requested, asynchronous=True)


@pytest.mark.parametrize(("placement", "name"), [(SEPARATE, "nccl"), (CPU_ONE_NODE, "shared_memory")])
def test_asynchronous_elsewhere(placement, name) -> None:
    assert choose_transport(*placement, "auto", asynchronous=True).name == name
