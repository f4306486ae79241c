"""``skirl show-placement``: what it prints, that it starts nothing, and that docs/placement.md says what is so."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import skirl.cli.main as cli
from skirl.config.load import load
from skirl.runtime import memory
from skirl.runtime.placement import Cluster, Node, plan_placement, plan_transport

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "placement.md"
BASE: dict[str, Any] = {
    "model": {"path": "models/none", "dtype": "bfloat16", "gradient_checkpointing": True},
    "data": {"train": {"a": {"path": "a.jsonl", "format": "text"}}},
    "run": {"dir": "runs/a"},
    "train": {"steps": 10, "prompts_per_step": 16},
    "reward": {"python": "r.py"},
    "method": {"preset": "grpo", "kl": {"coef": 0.01}},
    "rollout": {"engine": "vllm"},
    "trainer": {"backend": "deepspeed", "ranks": 2},
    "runtime": {"kind": "ray"},
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(yaml.safe_dump(BASE), encoding="utf-8")
    return "x.yaml"


def run(capfd: Any, *words: str) -> tuple[int, str, str]:
    code = cli.main(["show-placement", *words])
    out, err = capfd.readouterr()
    return code, out, err


def shown(capfd: Any, *words: str) -> dict[str, Any]:
    code, out, err = run(capfd, *words, "--json")
    assert code == 0, err
    return json.loads(out)


GPUS = ["--nodes", "1", "--gpus-per-node", "2", "--gpu-memory-gb", "80"]


def test_table_of_a_shared_group(recipe: str, checkpoints: Any, capfd: Any) -> None:
    code, out, _ = run(capfd, recipe, *GPUS, "--model.path", str(checkpoints["untied"]))
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("skirl train on pretended nodes: 1 node, 2 GPUs (80.0 GiB each)")
    assert "node-0 0-1 0: policy, reference, rollout policy 0-1 (with reference), rollout 0-1" in lines
    assert "weights reach the engines by cuda_ipc" in lines
    share = next(line for line in lines if line.startswith("each engine takes"))
    assert share == "each engine takes 0.850 of its GPUs' memory (found by skirl)"
    assert any(line.startswith("engines sleep while the policy trains: level 2 (auto:") for line in lines)
    weights = 2 * memory.read_model_shape(checkpoints["untied"]).total / memory.GIB
    assert f"0 policy weights {weights:.2f} GiB {weights:.2f} GiB" in lines


def test_separate_groups_over_two_nodes(recipe: str, capfd: Any) -> None:
    groups = "[{roles: [policy, reference], gpus: 2}, {roles: [rollout], gpus: 6}]"
    flags = ["--nodes", "2", "--gpus-per-node", "4", "--runtime.placement", groups]
    found = shown(capfd, recipe, *flags, "--rollout.engine", "{kind: vllm, tensor_parallel_size: 2}")
    assert found["transport"] == "nccl"
    assert [group["strategy"] for group in found["groups"]] == ["PACK", "STRICT_PACK"]
    engines = [process for process in found["processes"] if process["role"] == "rollout"]
    assert [engine["bundles"] for engine in engines] == [[0, 1], [2, 3], [4, 5]]
    assert all(len(set(engine["nodes"])) == 1 for engine in engines)
    assert found["sleep"] is None
    assert any("there is no models/none yet" in note for note in found["notes"])
    code, out, _ = run(capfd, recipe, *flags, "--rollout.engine", "{kind: vllm, tensor_parallel_size: 2}")
    assert code == 0
    assert "(2 GPUs each)" in out


def test_this_machine_without_gpus(recipe: str, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skirl.cli.show_placement.local_cluster", lambda: Cluster((Node("laptop", 2.0),)))
    found = shown(capfd, recipe)
    assert (found["device"], found["transport"], found["source"]) == ("cpu", "shared_memory", "this machine")
    assert [process["cpus"] for process in found["processes"]] == [0.5, 0.5, 0.5]


def test_impossible_requests_exit_with_2_and_numbers(recipe: str, checkpoints: Any, capfd: Any) -> None:
    code, out, err = run(capfd, recipe, *GPUS, "--trainer.ranks", "9")
    assert code == 2
    assert (
        "trainer.ranks = 9 (--trainer.ranks) needs 9 GPUs (policy, reference, rollout: 9), but the cluster has 2" in err
    )
    assert "pretended nodes" in out
    code, _, err = run(capfd, recipe, *GPUS, "--gpu-memory-gb", "4", "--model.path", str(checkpoints["tied"]))
    assert code == 2
    assert "An engine's weights take" in err
    engine = "{kind: vllm, tensor_parallel_size: 3}"
    placement = "[{roles: [policy, reference], gpus: 2}, {roles: [rollout], gpus: 3}]"
    flags = ["--nodes", "1", "--gpus-per-node", "5", "--rollout.engine", engine, "--runtime.placement", placement]
    code, _, err = run(capfd, recipe, *flags, "--model.path", str(checkpoints["tied"]))
    assert code == 2
    assert "tensor_parallel_size = 3 (--rollout.engine) does not divide the model's" in err


def test_a_contradiction_names_where_it_was_written(recipe: str, capfd: Any) -> None:
    code, _, err = run(capfd, recipe, *GPUS, "--runtime.placement", "[{roles: [policy, reference, rollout], gpus: 1}]")
    assert code == 2
    assert re.search(r"trainer\.ranks = 2 \(x\.yaml:\d+\) need 2", err)


def test_memory_that_will_not_do_is_noted(recipe: str, tmp_path: Path, capfd: Any) -> None:
    """Weights, gradients, masters and moments of a 1B model need 19.4 GiB."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1 << 30], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "big").mkdir()
    (tmp_path / "big/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "big/config.json").write_text(json.dumps(sizes))
    flags = [
        *GPUS[:4],
        "--gpu-memory-gb",
        "18",
        "--trainer.offload",
        "{}",
        "--trainer.max_tokens_per_micro_batch",
        "999",
    ]
    found = shown(capfd, recipe, *flags, "--model.path", "big")
    (note,) = [note for note in found["notes"] if note.startswith("group 0")]
    assert note.startswith("group 0 needs about 19.4 GiB of 18.0 GiB on each GPU while it trains")


def test_a_cluster_that_does_not_answer_is_said(recipe: str, capfd: Any) -> None:
    found = shown(capfd, recipe, "--runtime.address", "127.0.0.1:9", "--runtime.device", "cpu")
    assert found["source"] == "this machine"
    assert "no Ray cluster answers at runtime.address = 127.0.0.1:9" in found["notes"][0]


def test_a_local_recipe_runs_in_one_process(recipe: str, checkpoints: Any, capfd: Any) -> None:
    flags = ["--runtime", "local", "--rollout.engine", "policy", "--trainer.backend", "single"]
    found = shown(capfd, recipe, *flags, "--model.path", str(checkpoints["tied"]))
    assert found["processes"] == []
    assert [item["name"] for item in found["bytes"][0]] == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "weights",
    ]
    assert "everything runs in the driver's process" in found["notes"][-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "'0' is given; it must be a whole number of 1 or more"),
        (["--gpus-per-node", "x"], "'x' is given; it must be a whole number of 0 or more"),
        (["--gpu-memory-gb", "-1"], "'-1' is given; it must be a number of 0 or more"),
        (["--gpu-memory-gb", "nan"], "'nan' is given; it must be a number of 0 or more"),
        (["--nodes"], "expected one argument"),
    ],
)
def test_bad_usage(recipe: str, capfd: Any, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["show-placement", recipe, *words])
    assert caught.value.code == 2
    assert f"argument {words[0]}: {said}" in capfd.readouterr().err


def test_it_imports_neither_torch_nor_ray(recipe: str) -> None:
    script = (
        "import sys, skirl.cli.main as cli\n"
        "assert cli.main(['show-placement', sys.argv[1]]) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'deepspeed', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", script, str(Path(recipe).resolve())]
    source = Path(cli.skirl.__file__).parents[1]  # where the package is found, installed or not
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------------------------------------------------- document
SNIPPET = re.compile(r"^```yaml\n# (\d+) nodes?, (\d+) GPUs: (\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_documents_placements_are_what_it_says(tmp_path: Path) -> None:
    snippets = SNIPPET.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert len(snippets) == DOCUMENT.read_text(encoding="utf-8").count("```yaml") == 6
    for nodes, gpus, transport, text in snippets:
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE), encoding="utf-8")
        (tmp_path / "x.yaml").write_text("inherits: base.yaml\n" + text, encoding="utf-8")
        config = load(tmp_path / "x.yaml").config
        cluster = Cluster(tuple(Node(f"n{i}", 2.0 if gpus == "0" else 64.0, int(gpus)) for i in range(int(nodes))))
        found = plan_placement(config, cluster, command="train", heads=(32, 8))
        assert plan_transport(config, found) == transport, text
        assert len({name for group in found.groups for name in group.nodes}) == int(nodes), text


def test_the_documents_commands_run(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(ROOT)
    found = re.findall(r"^    (skirl .*)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    for command in found:
        assert cli.main(shlex.split(command)[1:]) == 0, command
    capfd.readouterr()


def test_the_document_states_the_codes_constants() -> None:
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"it is {memory.MAX_ENGINE_SHARE} on GPUs of its own" in text
    assert f"{memory.MARGIN_BYTES // memory.GIB} GiB are left for them" in text
    assert f"{memory.BYTES_A_LOGIT} bytes a logit of {memory.HEAD_CHUNK:,} tokens" in text
    rates = f"{memory.RESEND_BYTES_PER_S / 1e9:g} GB/s against all bytes at {memory.HOST_COPY_BYTES_PER_S / 1e9:g} GB/s"
    assert f"frozen bytes at {rates}" in text
