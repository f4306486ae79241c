"""Scalar heads: packed values are transformers' own, and every export reloads in a fresh process with equal outputs."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.errors import ModelError
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.checkpoints import read_json
from skirl.models.clips import ClipStore
from skirl.models.loading import export_model, load_model, set_trainable
from skirl.models.policy import check_packing
from skirl.models.scalar_heads import MEAN, STD, ScalarHead, pad_id
from skirl.models.value import ValueModel, load_value_model
from skirl.prompts.decode import load_clip
from skirl.records import TrainingSequence
from skirl.training.backends.single import scoring_pass
from skirl.training.rows import make_row
from tests import tiny

TEXT = ("tied", "untied")
LENGTHS = (4, 1, 7)
CPU = torch.device("cpu")


def load(directory, *, kind="token", reads="before", freeze=("encoder",)):
    """A value model as a worker has it."""
    register_packed_attention()
    is_audio = "audio_config" in (directory / "config.json").read_text()
    parts = {"": "sdpa", "text_config": PACKED_ATTENTION, "audio_config": "sdpa"}
    attention = parts if is_audio else PACKED_ATTENTION
    loaded = load_value_model(directory, kind=kind, dtype="float32", attn_implementation=attention)
    set_trainable(loaded.model, loaded.family, freeze)
    clips = None
    if is_audio:
        clips = ClipStore(loaded.model, loaded.family, loaded.processor, load=load_clip, encoder_frozen=True)
    return ValueModel(loaded, clips, reads)


def moved(model, seed=1):
    """The model with a head as training might leave it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def export(model, directory):
    export_model(model.loaded, {n: p.detach() for n, p in model.named_model_parameters()}, directory, "same")
    return directory


def values(model, plan):
    return scoring_pass(model, None, plan, range(plan.num_ranks))


@dataclass(frozen=True)
class Exported:
    """A model, what was written of it, and what a fresh process computes with that for a sequence."""

    model: ValueModel
    directory: Path
    sequence: TrainingSequence
    values: np.ndarray


EXPORTS: dict[str, Any] = {"tied": ("token", "before"), "untied": ("sequence", "at"), "native": ("token", "before")}
VERIFY = """
import io, json, sys
from skirl.models import verify
for directory, probe in json.load(sys.stdin):
    sys.argv, sys.stdin = ["verify", directory], io.StringIO(probe)
    verify.main()
"""


@pytest.fixture(scope="module")
def exported(checkpoints, tmp_path_factory):
    """By checkpoint; one fresh process for all."""
    made, asked = {}, []
    for name, (kind, reads) in EXPORTS.items():
        model = moved(load(checkpoints[name], kind=kind, reads=reads))
        model.scalar_head.set_scores(0.25, 2.0)
        directory = export(model, tmp_path_factory.mktemp("exported") / name)
        (sequence,) = tiny.sequences(tiny.make_kit(checkpoints[name]), (5,))
        probe = {
            "input_ids": sequence.input_ids.tolist(),
            "action_positions": sequence.action_positions.tolist(),
            "media": [(m.path, m.start_s, m.duration_s, None) for m in sequence.media],
            "reads": reads,
        }
        asked.append((str(directory), json.dumps(probe)))
        made[name] = (model, directory, sequence)
    command = [sys.executable, "-c", VERIFY]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [np.asarray(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: Exported(*parts, got) for (name, parts), got in zip(made.items(), answers, strict=True)}


# ------------------------------------------------------------------------------------------------------ values
@pytest.mark.parametrize("reads", ["before", "at"])
@pytest.mark.parametrize("name", [*TEXT, "native"])
def test_packed_values_are_those_of_transformers(checkpoints, name, reads, tmp_path):
    model = moved(load(checkpoints[name], reads=reads))
    plan = tiny.whole(tiny.sequences(tiny.make_kit(checkpoints[name]), LENGTHS))
    in_one_row, each = values(model, plan), values(model, tiny.alone(plan))
    assert max(float((in_one_row[i] - each[i]).abs().max()) for i in each) < 1e-4
    if name == "native":
        return
    import transformers

    directory = export(model, tmp_path / "export")
    plain = transformers.AutoModelForTokenClassification.from_pretrained(directory).eval()
    for index, sequence in enumerate(plan.sequences):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(sequence.input_ids)[None], use_cache=False).logits[0, :, 0]
        wanted = logits[sequence.action_positions - (reads == "before")]
        torch.testing.assert_close(in_one_row[index], wanted, rtol=1e-5, atol=1e-4)


def test_a_new_head_values_everything_at_0_and_learns_at_once(checkpoints):
    model = load(checkpoints["tied"])
    plan = tiny.whole(tiny.sequences(tiny.make_kit(checkpoints["tied"]), LENGTHS))
    row, streams = make_row(plan, plan.steps[0].ranks[0][0], CPU)
    found, second, auxiliary = model(row)
    assert found.dtype == torch.float32
    assert not found.any()
    assert not second.any()
    assert (len(found), len(second), len(auxiliary)) == (sum(LENGTHS), sum(LENGTHS), 0)
    (streams.weights * (found - 1).square()).sum().backward()
    assert model.head.weight.grad.any()
    assert model.head.bias.grad.any()


def test_values_are_float32_products_of_half_precision_weights(checkpoints):
    register_packed_attention()
    loaded = load_value_model(checkpoints["tied"], kind="token", dtype="bfloat16", attn_implementation=PACKED_ATTENTION)
    model = moved(ValueModel(loaded, None, "before"))
    plan = tiny.whole(tiny.sequences(tiny.make_kit(checkpoints["tied"]), LENGTHS))
    row, _ = make_row(plan, plan.steps[0].ranks[0][0], CPU)
    found = model(row)[0]
    hidden = model.hidden(row)[row.predictors]
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(found, hidden.float() @ model.head.weight.float()[0] + model.head.bias.float())


def test_the_interface_is_the_policys(checkpoints):
    model = load(checkpoints["untied"])
    assert check_packing(model, 1e-4) < 1e-4
    names = [name for name, _ in model.named_model_parameters()]
    assert names[-2:] == ["score.weight", "score.bias"]
    assert "lm_head.weight" not in names
    assert [spec.name for spec in model.tensor_specs()] == names
    assert {spec.name: spec.shape for spec in model.tensor_specs()}["score.weight"] == (1, 32)
    assert all(spec.trained for spec in model.tensor_specs())


def test_the_head_trains_whatever_is_frozen(checkpoints):
    model = load(checkpoints["native"], freeze=("encoder", "language_model"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"adapter", "head"}


# ------------------------------------------------------------------------------------------------------ exports
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_reload_in_a_fresh_process(exported, name):
    kind, _ = EXPORTS[name]
    one = exported[name]
    config = read_json(one.directory / "config.json")
    stem = "Qwen3ASR" if name == "native" else "Qwen3"
    assert config["architectures"] == [stem + {"token": "ForToken", "sequence": "ForSequence"}[kind] + "Classification"]
    assert (config["skirl_reward_mean"], config["skirl_reward_std"]) == (0.25, 2.0)
    assert (one.directory / "tokenizer.json").exists()
    wanted = values(one.model, tiny.whole([one.sequence]))[0].numpy()
    np.testing.assert_allclose(one.values, wanted if kind == "token" else wanted[-1:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_read_back_whole(exported, name):
    kind, _ = EXPORTS[name]
    one = exported[name]
    again = load_value_model(one.directory, kind=None, dtype="float32")
    form = {"token": "answer", "sequence": "answer_and_end"}[kind]
    assert again.scalar_head == ScalarHead(kind, mean=0.25, std=2.0, form=form)
    held, kept = again.model.state_dict(), one.model.loaded.model.state_dict()
    assert held.keys() == kept.keys()
    assert all(torch.equal(held[n], kept[n]) for n in kept)


def test_a_model_of_the_release_layout_is_exported_in_transformers_own(checkpoints, tmp_path):
    model = moved(load(checkpoints["original"]))
    plan = tiny.whole(tiny.sequences(tiny.make_kit(checkpoints["original"]), (5,)))
    again = load(export(model, tmp_path / "export"))
    assert again.loaded.layout == "native"
    torch.testing.assert_close(values(again, plan)[0], values(model, plan)[0])


def test_a_policy_cannot_be_loaded_from_an_export(checkpoints, tmp_path):
    with pytest.raises(ModelError, match="Qwen3ForTokenClassification writes no text"):
        load_model(export(load(checkpoints["tied"]), tmp_path / "export"), dtype="float32")


def test_heads_of_the_other_kind(checkpoints, tmp_path):
    """A critic starts from a reward model with a bias of 0; a bias that is not 0 has no place in a reward model."""
    reward = export(moved(load(checkpoints["tied"], kind="sequence", reads="at")), tmp_path / "reward")
    critic = load(reward)
    assert not critic.head.bias.any()
    assert critic.scalar_head.mean is None
    torch.testing.assert_close(critic.head.weight, moved(load(checkpoints["tied"], kind="sequence")).head.weight)
    back = load(export(critic, tmp_path / "critic"), kind="sequence", reads="at")
    assert torch.equal(back.head.weight, critic.head.weight)
    critic.head.bias.data += 1
    with pytest.raises(ModelError, match=r"score\.bias is not part of the model"):
        load(export(critic, tmp_path / "biased"), kind="sequence", reads="at")


def test_mean_and_spread_of_other_scores_are_not_handed_on(checkpoints, tmp_path):
    """What a reward model stored of its scores says nothing of a critic that started from it."""
    model = moved(load(checkpoints["tied"], kind="sequence", reads="at"))
    model.scalar_head.set_scores(0.25, 2.0)
    reward = export(model, tmp_path / "reward")
    assert read_json(reward / "config.json")[MEAN] == 0.25
    critic = read_json(export(load(reward), tmp_path / "critic") / "config.json")
    assert not {MEAN, STD} & critic.keys()


# ------------------------------------------------------------------------------------------------------ whole or not
def changed(source, directory, tensors=None, **config):
    import shutil

    shutil.copytree(source, directory)
    file = directory / "model.safetensors"
    save_file((tensors or dict)(load_file(file)), file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(read_json(directory / "config.json") | config))
    return directory


@pytest.mark.parametrize("name", ["tied", "native"])
def test_loading_is_whole_or_an_error(checkpoints, name, tmp_path):
    start = checkpoints[name]
    victim = next(n for n in load_file(start / "model.safetensors") if n.endswith("layers.1.mlp.up_proj.weight"))

    def without(*lost):
        return lambda tensors: {n: t for n, t in tensors.items() if n not in lost}

    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load(changed(start, tmp_path / "a", without(victim)))
    with pytest.raises(ModelError, match=r"more\.weight is not part of the model"):
        load(changed(start, tmp_path / "b", lambda tensors: {**tensors, "more.weight": torch.zeros(1)}))
    with_head = export(moved(load(start)), tmp_path / "c")
    with pytest.raises(ModelError, match=r"score\.weight is missing"):
        load(changed(with_head, tmp_path / "d", without("score.weight")))


def test_what_is_no_scalar_head(checkpoints, tmp_path):
    start = checkpoints["tied"]
    with pytest.raises(ModelError, match="has no scalar head"):
        load(start, kind=None)
    two = {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "a", "1": "b"}}
    with pytest.raises(ModelError, match="gives 2 numbers a token"):
        load(changed(start, tmp_path / "two", **two))
    other = {"architectures": ["Qwen3ForAudioClassification"], "id2label": {"0": "a"}}
    with pytest.raises(ModelError, match=r"Qwen3ForAudioClassification has no scalar head that skirl knows"):
        load(changed(start, tmp_path / "other", **other))
    with pytest.raises(ModelError, match=r"no class \.\.\.ForTokenClassification for model_type 'olmoe'"):
        load(changed(start, tmp_path / "olmoe", model_type="olmoe"))


def test_scores_without_spread_are_refused(checkpoints):
    head = load(checkpoints["tied"], kind="sequence").scalar_head
    for mean, std in ((0.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ModelError, match="cannot be standardised"):
            head.set_scores(mean, std)


def test_the_pad_token_ends_no_text(checkpoints):
    tokenizer = tiny.make_kit(checkpoints["tied"]).loaded.tokenizer
    assert pad_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    assert pad_id(tokenizer) != tokenizer.eos_token_id
