"""Checkpoints that a recipe names: which a command looks at, and what is told of those that are none."""

import json
from pathlib import Path

import pytest

from skirl.config.check_files import TAG_WRITERS, check_checkpoints
from skirl.config.load import load
from skirl.errors import ModelError
from skirl.models.families import FAMILIES

RECIPE = """\
model: {path: good}
data: {train: {a: {path: a.jsonl}}}
run: {dir: r}
kd: {teacher: bad/teacher}
critic: {path: bad/critic}
reward: {models: {taste: {path: bad/taste}}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    checkpoint("good", "Qwen3ForCausalLM")
    checkpoint("scores", "Qwen3ForSequenceClassification")
    Path("x.yaml").write_text(RECIPE, encoding="utf-8")
    return Path("x.yaml")


def checkpoint(directory: str, architecture: str) -> None:
    Path(directory).mkdir(parents=True)
    Path(directory, "config.json").write_text(json.dumps({"architectures": [architecture]}), encoding="utf-8")


def refusal(recipe: Path, command, *flags: str) -> str:
    loaded = load(recipe, flags)
    with pytest.raises(ModelError) as caught:
        check_checkpoints(loaded.config, command, loaded.provenance)
    return str(caught.value)


def passes(recipe: Path, command, *flags: str) -> bool:
    loaded = load(recipe, flags)
    check_checkpoints(loaded.config, command, loaded.provenance)
    return True


HUB = "is no directory on this machine. skirl reads local checkpoints only; for a hub name, run `hf download"
TASTE = "--reward.models.taste.path"


def test_each_command_looks_at_what_it_loads(recipe):
    assert passes(recipe, "sft")
    assert passes(recipe, "dpo")
    assert refusal(recipe, "kd") == (
        f"kd.teacher = bad/teacher (x.yaml:4) {HUB} bad/teacher --local-dir DIR` and set kd.teacher to DIR."
    )
    assert refusal(recipe, "sample").startswith(f"reward.models.taste.path = bad/taste (x.yaml:6) {HUB} bad/taste")
    told = refusal(recipe, "train", "--method.preset", "ppo").splitlines()
    assert [line.split(" ")[0] for line in told] == ["critic.path", "reward.models.taste.path"]
    assert passes(recipe, "train", TASTE, "scores")  # grpo has no critic
    assert passes(recipe, "train", TASTE, "scores", "--method.preset", "ppo", "--critic.path", "null")
    assert refusal(recipe, "eval", "--model.path", "Qwen/Qwen3-4B").startswith(
        f"model.path = Qwen/Qwen3-4B (--model.path) {HUB} Qwen/Qwen3-4B --local-dir DIR` and set model.path to DIR."
    )


def test_a_reward_model_must_give_numbers(recipe):
    assert refusal(recipe, "train", TASTE, "good") == (
        "reward.models.taste.path = good (--reward.models.taste.path) has no scalar head: it is a model that writes "
        "text. `skirl rm` trains one on it; set reward.models.taste.path to its hf/step-* then."
    )
    Path("scores/config.json").write_text("{", encoding="utf-8")  # told of by who loads it
    assert passes(recipe, "train", TASTE, "scores")


def test_the_language_term_needs_a_model_that_writes_the_language(recipe):
    """For any other it would be 0 for every response, and teach nothing."""
    assert {
        name for name, f in FAMILIES.items() if f.answer(text="x", language="English", forced=False) != "x"
    } == TAG_WRITERS
    term = (TASTE, "scores", "--reward.terms.tag", "language")
    config = Path("good/config.json")
    config.write_text('{"model_type": "qwen2_audio"}', encoding="utf-8")
    assert refusal(recipe, "train", *term) == (
        "reward.terms.tag scores the language tag that the policy writes, but model.path = good (x.yaml:1) is a "
        "qwen2_audio, which writes none: every response would get 0. Remove the term (reward.terms.tag: null)."
    )
    assert passes(recipe, "eval", *term)
    config.write_text('{"model_type": "qwen3_asr"}', encoding="utf-8")
    assert passes(recipe, "train", *term)


def test_the_directory_of_a_run_is_none(recipe):
    """Its config.json is the recipe, resolved."""
    Path("old/hf/step-000007").mkdir(parents=True)
    Path("old/hf/step-000007/config.json").touch()
    Path("old/config.json").write_text(json.dumps({"model": {}, "run": {}}), encoding="utf-8")
    assert refusal(recipe, "train", TASTE, "old") == (
        "reward.models.taste.path = old (--reward.models.taste.path) is a run's directory, and no checkpoint: set "
        "reward.models.taste.path to an export in it, such as old/hf/step-000007."
    )


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ((), "set model.path to the directory that holds config.json and model*.safetensors."),
        (
            ("hf/step-000010/config.json", "hf/step-000020/config.json"),
            "set model.path to an export in it, such as there/hf/step-000020.",
        ),
        (("step-000010/config.json",), "set model.path to an export in it, such as there/step-000010."),
        (
            ("adapter_config.json",),
            "it holds a LoRA adapter without its model. Add it in (`skirl merge-lora there --base MODEL --output DIR`) "
            "and set model.path to DIR.",
        ),
    ],
)
def test_directories_that_are_something_else(recipe, files, told):
    Path("there").mkdir()
    for file in files:
        Path("there", file).parent.mkdir(parents=True, exist_ok=True)
        Path("there", file).touch()
    assert refusal(recipe, "sft", "--model.path", "there") == (
        f"model.path = there (--model.path) has no config.json, so it is no checkpoint of Hugging Face: {told}"
    )
