"""The tiny text task: files, prompts, reward, and that its recipe fits them."""

import json
from pathlib import Path

import pytest
import yaml

from skirl.config.schema import DataConfig, SourceConfig
from skirl.models.loading import load_model, load_tokenizer_and_family, stop_ids
from skirl.prompts.decode import padded_num_samples
from skirl.prompts.validate import load_rows
from skirl.records import RewardSample
from skirl.rewards.python_file import load
from skirl.rollouts.render import Renderer
from skirl.testing.tiny_task import NUM_DIGITS, RESPONSE_LENGTH, main, tiny_prompts, tiny_task

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "text-grpo-vllm.yaml"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_task(directory)
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_equal_seeds_give_equal_files(task, tmp_path):
    tiny_task(tmp_path / "same")
    tiny_task(tmp_path / "other", seed=1)
    assert contents(tmp_path / "same") == contents(task)
    changed = {name for name, data in contents(tmp_path / "other").items() if contents(task)[name] != data}
    assert changed == {"model.safetensors"}


def test_the_model_is_tiny_and_every_token_can_be_read(task):
    loaded = load_model(task / "model", dtype="float32")
    files = load_tokenizer_and_family(task / "model")
    sizes = {p.data_ptr(): p.numel() for p in loaded.model.parameters()}
    assert 80_000 < sum(sizes.values()) < 120_000
    assert len(files.tokenizer) == files.config.vocab_size == 64
    texts = [files.tokenizer.decode([token]) for token in range(64)]
    assert len(set(texts)) == 64
    assert [t for t in texts if len(t) != 1] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"]
    assert stop_ids(task / "model", files) == (2, 0)


def test_prompts_are_rendered_by_the_chat_template(task):
    rows, _ = load_rows({"echo": SourceConfig(path=task / "prompts.jsonl", format="text")}, DataConfig())
    files = load_tokenizer_and_family(task / "model")
    renderer = Renderer(files.family, files.tokenizer, files.config, forced=False, num_samples=padded_num_samples)
    prompts = renderer.prompts(rows)
    assert [p.id for p in prompts] == [f"echo/{row['id']}" for row in tiny_prompts()]
    assert files.tokenizer.decode(prompts[3].input_ids) == "say 3<|im_end|><|im_start|>"
    assert files.tokenizer.unk_token_id not in {token for p in prompts for token in p.input_ids}
    for prompt in prompts:
        assert prompt.reference is not None
        ids = files.tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]
        assert len(ids) == RESPONSE_LENGTH
        assert files.tokenizer.decode(ids) == prompt.reference


def sample(text, reference):
    return RewardSample("p", 0, text, text, None, (), "length", reference, None, 0.0, {})


def test_reward_is_the_share_of_agreeing_places():
    reward = load(ROOT / "recipes" / "rewards" / "echo.py", "reward").call
    assert reward(sample("3" * 16, "3" * 16)) == 1.0
    assert reward(sample("3" * 20, "3" * 16)) == 1.0
    assert reward(sample("3" * 4, "3" * 16)) == 0.25
    assert reward(sample("", "3" * 16)) == 0.0
    assert reward(sample("x3" * 8, "3" * 16)) == 0.5


def test_a_policy_that_ignores_its_prompt_cannot_pass():
    reward = load(ROOT / "recipes" / "rewards" / "echo.py", "reward").call
    for blind in ("0" * 16, "0123" * 4, "01" * 8):
        scores = [reward(sample(blind, row["answer"])) for row in tiny_prompts()]
        assert sum(scores) / len(scores) <= 1 / NUM_DIGITS


def test_the_recipe_fits_the_task():
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    rows = tiny_prompts()
    assert len({row["id"] for row in rows}) == len(rows)
    assert len(rows) % recipe["train"]["prompts_per_step"] == 0, "no prompt comes twice in a step"
    assert recipe["rollout"]["sampling"]["max_new_tokens"] == RESPONSE_LENGTH
    assert (ROOT / recipe["reward"]["python"]).is_file()


def test_the_documented_command_writes_what_the_recipe_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (command,) = [line for line in RECIPE.read_text(encoding="utf-8").splitlines() if "python -m" in line]
    *module, directory = command.split("# first")[0].strip("# ").split()
    assert module == ["python", "-m", main.__module__]
    main([directory])
    assert capsys.readouterr().out.startswith(f"wrote {directory}/model, prompts.jsonl and rows of conversations")
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    assert (tmp_path / recipe["model"]["path"] / "config.json").is_file()
    prompts = tmp_path / recipe["data"]["train"]["echo"]["path"]
    assert [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()] == tiny_prompts()
