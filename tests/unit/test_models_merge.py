"""``skirl merge-lora`` given what is no adapter or no base: what is named, what to do, and that nothing is left."""

import shutil

import pytest

from skirl.errors import ModelError
from skirl.models.loading import load_model
from skirl.models.merge import merge
from skirl.testing.tiny_models import tiny_qwen3

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("made") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    import peft

    directory = base.parent / "adapter"
    model = load_model(base, dtype="float32").model
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(directory))
    return directory


def _without(name):
    return lambda directory: (directory / name).unlink()


def _holding(name, content):
    return lambda directory: (directory / name).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without(CONFIG), r"spoilt is no adapter: there is no adapter_config.json in it\. Copy the adapter again"),
        (_without(WEIGHTS), r"there is no adapter_model.safetensors in it\. Copy the adapter again, with both files"),
        (_holding(WEIGHTS, b"hello"), r"spoilt/adapter_model.safetensors cannot be read .* damaged; copy it again"),
        (_holding(CONFIG, b'{"r": 4,'), r"spoilt/adapter_config.json cannot be read as JSON .* damaged"),
        (_holding(CONFIG, b"{}"), r"spoilt/adapter_config.json: peft_type is None, and only LORA .* another adapter"),
        (
            lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"),
            r"Pickled weights are not read: write adapter_model.bin again as adapter_model.safetensors",
        ),
    ],
)
def test_a_spoilt_adapter_is_named_with_what_to_do(base, adapter, tmp_path, spoil, said):
    spoilt = shutil.copytree(adapter, tmp_path / "spoilt")
    spoil(spoilt)
    with pytest.raises(ModelError, match=said):
        merge(spoilt, base, tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["spoilt"], "nothing is left"


def test_directories_that_are_something_else_are_named_with_what_to_do(base, adapter, tmp_path):
    (tmp_path / "file").touch()
    for given, said in (
        (adapter.parent, rf"is no adapter: there is no {CONFIG} and no {WEIGHTS} in it\. Give .* such as {adapter}\."),
        (base, r"is no adapter: .* Give the directory that peft saved, or hf/step-\*/adapter of a run"),
        (tmp_path / "none", r"none is no directory: .* Give the directory that peft saved"),
    ):
        with pytest.raises(ModelError, match=said):
            merge(given, base, tmp_path / "merged")
    for given, said in (
        (tmp_path / "none", r"none is no checkpoint: there is no such directory\. Give --base the model"),
        (adapter, r"adapter is no checkpoint: it holds an adapter, not the model that it belongs to\. Give --base"),
        (tmp_path, r"is no checkpoint: there is no config.json in it\. Give --base the model"),
    ):
        with pytest.raises(ModelError, match=said):
            merge(adapter, given, tmp_path / "merged")
    with pytest.raises(ModelError, match=r"file/merged cannot be made \(Not a directory\): choose another directory"):
        merge(adapter, base, tmp_path / "file/merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
