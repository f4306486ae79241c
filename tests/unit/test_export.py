"""Exports count once a fresh process gives the same log-probs; a damaged one is refused and leaves no hf/step-*."""

import json
import logging
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skirl.assemble_worker import build_worker
from skirl.config.schema import Config
from skirl.errors import CheckpointError, ModelError
from skirl.models.loading import load_model
from skirl.models.verify import probe_logprobs, probe_values
from skirl.records import Media, Sampling
from skirl.runtime.local import LocalWorkers
from skirl.runtime.worker import WorkerSpec
from skirl.step import score_one, value_one
from skirl.training.export import Exports
from skirl.training.objective import PolicyObjective, SupervisedObjective
from skirl.training.value_objective import ValueObjective
from tests import tiny

TOLERANCE = 1e-5
KINDS = {
    "tied": ("tied", {}),
    "untied": ("untied", {}),
    "native": ("native", {}),
    "original": ("original", {}),
    "native to original": ("native", {"export_layout": "original"}),
    "original to native": ("original", {"export_layout": "native"}),
    "native, encoder trained": ("native", {"freeze": ()}),
}
WINDOWED = ("qwen2_audio", "glmasr", "voxtral", "audioflamingo3")


def trained(checkpoints, name, sampling=None, **model):
    """(workers after two updates, a probe): weights that are not those of the checkpoint they came from."""
    kit = tiny.make_kit(checkpoints[name])
    made = tiny.sequences(kit, (6, 4), streams=False)
    objective = SupervisedObjective(sampling or Sampling())
    workers = tiny.make_workers(checkpoints[name], objective, with_reference=False, **model)
    before = score_one(workers, made[0])
    for n in (1, 2):
        workers.update(tiny.whole(made), n)
    assert np.abs(score_one(workers, made[0]) - before).max() > 1e-2
    return workers, made[0]


def exports(directory, workers, probe, sampling=None, tolerance=TOLERANCE):
    return Exports(directory, probe, lambda: score_one(workers, probe), sampling or Sampling(), tolerance=tolerance)


class Tampering:
    """A trainer whose export is changed before anyone reads it."""

    def __init__(self, workers, change):
        self._workers, self._change = workers, change

    def export(self, directory):
        self._workers.export(directory)
        self._change(directory)


@pytest.fixture(scope="module")
def text(checkpoints):
    return trained(checkpoints, "tied")


@pytest.fixture(scope="module")
def speech(checkpoints):
    return trained(checkpoints, "native")


# ------------------------------------------------------------------------------------------------------------ good ones
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "speech"])
def test_an_export_is_reloaded_in_a_fresh_process(tmp_path, caplog, kind, text, speech, record_property):
    workers, probe = text if kind == "text" else speech
    if kind == "speech":  # a row of a Parquet table has no file
        clip = probe.media[0]
        inside = Media("table.parquet:row 1(audio)", clip.start_s, clip.duration_s, Path(clip.path).read_bytes())
        probe = replace(probe, media=(inside,))
    with caplog.at_level(logging.INFO, logger="skirl.training.export"):
        path = exports(tmp_path, workers, probe).write(60, workers)
    assert path == tmp_path / "step-000060"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000060"]
    difference = float(re.search(r"largest difference of log-probs (\S+)", caplog.text)[1])
    record_property(f"export_vs_trainer/{kind}", difference)
    assert difference < TOLERANCE


def with_critic(checkpoints, **trainer):
    """(workers after an update of policy and critic, a probe)."""
    path = checkpoints["tied"]
    made = tiny.sequences(tiny.make_kit(path), (6, 4))
    streams = {"old_logprobs": None, "reference_logprobs": None}
    config = Config.model_validate(
        {
            "model": {"path": path},
            "data": {},
            "run": {"dir": "unused"},
            "method": {"preset": "ppo"},
            "trainer": {"optim": {"lr": 1e-3}, **trainer},
        }
    )
    objectives = {"objective": PolicyObjective(Sampling()), "critic_objective": ValueObjective(clip=None)}
    worker = build_worker(WorkerSpec(config, total_prompts=10, with_reference=False, **objectives))
    workers = LocalWorkers(worker, num_ranks=1, batch_size=8)
    values = [
        replace(s, values=np.zeros(s.num_actions, dtype=np.float32), returns=np.ones(s.num_actions), **streams)
        for s in made
    ]
    workers.update(tiny.whole(values), 1, ("policy", "critic"))
    return workers, made[0]


def exports_of_both(directory, workers, probe, values=None):
    return Exports(
        directory,
        probe,
        lambda: score_one(workers, probe),
        Sampling(),
        tolerance=TOLERANCE,
        critic=lambda: value_one(workers, probe) if values is None else np.asarray(values),
    )


@pytest.mark.slow
def test_critic_and_average_are_reloaded_beside_the_policy(checkpoints, tmp_path, caplog, record_property):
    workers, probe = with_critic(checkpoints, ema={})
    assert np.abs(value_one(workers, probe)).max() > 1e-3
    with caplog.at_level(logging.INFO, logger="skirl.training.export"):
        path = exports_of_both(tmp_path, workers, probe).write(7, workers)
    directories = {p.name for p in path.iterdir() if p.is_dir()}
    assert directories == {"critic", "ema"}
    difference = float(re.search(r"largest difference of values (\S+)", caplog.text)[1])
    record_property("critic_vs_trainer", difference)
    assert difference < TOLERANCE


@pytest.mark.slow
def test_an_exported_average_gives_what_the_average_of_the_weights_gives(checkpoints, tmp_path, record_property):
    """Averaged here in float64, from the exports of each step; the model of these weights is made by hand."""
    workers, probe = with_critic(checkpoints, ema={"decay": 0.5}, optim={"lr": 1e-2})
    plan = tiny.whole([probe])
    start = load_file(checkpoints["tied"] / "model.safetensors")
    steps = []
    for number in (1, 2):
        steps.append({**start, **exported(workers, tmp_path / f"after-{number}")})  # tied heads are written once
        workers.update(plan, number)
    steps.append({**start, **exported(workers, tmp_path / "last")})
    average = {n: t.double() for n, t in start.items()}
    for weights in steps:
        average = {n: 0.5 * a + 0.5 * weights[n].double() for n, a in average.items()}
    by_hand = tmp_path / "by_hand"
    shutil.copytree(tmp_path / "last", by_hand, ignore=shutil.ignore_patterns("ema"))
    save_file({n: t.float() for n, t in average.items()}, by_hand / "model.safetensors", metadata={"format": "pt"})
    wanted = np.asarray(probe_logprobs(by_hand, as_probe(probe)))
    got = exports(tmp_path, workers, probe)._reload(tmp_path / "last" / "ema", "before")
    record_property("exported_average", float(np.abs(got - wanted).max()))
    assert np.abs(got - wanted).max() < TOLERANCE
    assert np.abs(got - score_one(workers, probe)).max() > 1e-2


def exported(workers, directory):
    directory.mkdir()
    workers.export(directory)
    return load_file(directory / "model.safetensors")


def test_a_critic_that_differs_is_refused(checkpoints, tmp_path, monkeypatch):
    """In this process: the fresh one runs the same functions."""
    workers, probe = with_critic(checkpoints)
    made = exports_of_both(tmp_path, workers, probe, values=[0.3] * 6)

    monkeypatch.setattr(made, "_reload", reloading(probe))
    with pytest.raises(CheckpointError, match=r"critic: the reloaded model's values differ"):
        made.write(7, workers)
    assert [p.name for p in tmp_path.iterdir()] == [".step-000007.tmp"]


def reloading(probe):
    def reload(directory, reads, dtype="auto"):
        found = probe_values if directory.name == "critic" else probe_logprobs
        return np.asarray(found(directory, as_probe(probe) | {"reads": reads, "dtype": dtype}))

    return reload


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (2.0, True), (6.0, False)])
def test_what_bfloat16_rounds_off_is_no_difference(checkpoints, tmp_path, monkeypatch, caplog, off, passes):
    """The trainer's numbers, moved by so many times what bfloat16 itself is off: a real model's is above any fixed
    bound, and another model's is a multiple of it.
    """
    workers, probe = trained(checkpoints, "tied", dtype="bfloat16")
    workers.export(tmp_path / "out")
    reload = reloading(probe)
    exact, half = reload(tmp_path / "out", "before", "float32"), reload(tmp_path / "out", "before")
    rounding = np.abs(exact - half).max()
    assert 1e-4 < rounding < 0.1
    made = Exports(tmp_path, probe, lambda: exact + off * rounding, Sampling(), tolerance=1e-6)
    monkeypatch.setattr(made, "_reload", reload)
    with caplog.at_level(logging.INFO, logger="skirl.training.export"):
        if passes:
            assert made.write(3, workers).is_dir()
            assert "log-probs in the type of the weights are off from float32's by" in caplog.text
        else:
            with pytest.raises(CheckpointError, match=r"differ from the trainer's by .* \(computed in float32; in the"):
                made.write(3, workers)


def as_probe(sequence, sampling=None):
    sampling = sampling or Sampling()
    return {
        "input_ids": sequence.input_ids.tolist(),
        "action_positions": sequence.action_positions.tolist(),
        "media": [(m.path, m.start_s, m.duration_s, None) for m in sequence.media],
        "sampling": {n: getattr(sampling, n) for n in ("temperature", "top_p", "top_k", "min_p", "banned_ids")},
    }


@pytest.mark.parametrize("kind", [*KINDS, *WINDOWED])
def test_log_probs_of_every_kind_of_export(checkpoints, tmp_path, kind, record_property):
    """What the fresh process computes, computed in this one: every family and layout, under a filtered distribution."""
    name, model = KINDS.get(kind, (kind, {}))
    sampling = Sampling(temperature=0.7, top_k=50, banned_ids=(7, 9))
    workers, probe = trained(checkpoints, name, sampling, **model)
    workers.export(tmp_path / "out")
    got = probe_logprobs(tmp_path / "out", as_probe(probe, sampling))
    difference = float(np.abs(got - score_one(workers, probe)).max())
    record_property(f"export_vs_trainer_in_process/{kind}", difference)
    assert difference < TOLERANCE
    assert np.abs(np.subtract(probe_logprobs(checkpoints[name], as_probe(probe, sampling)), got)).max() > 1e-2


def test_everything_that_belongs_to_a_model_is_there(checkpoints, tmp_path, speech):
    workers, _ = speech
    workers.export(tmp_path / "native")
    names = {p.name for p in (tmp_path / "native").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "processor_config.json", *tokenizer}
    workers, _ = trained(checkpoints, "native", export_layout="original")
    workers.export(tmp_path / "original")
    names = {p.name for p in (tmp_path / "original").iterdir()}
    assert names >= {"config.json", "model.safetensors", "preprocessor_config.json", "chat_template.json"}
    assert "thinker_config" in json.loads((tmp_path / "original/config.json").read_text())
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tmp_path / "native")
    found = processor(text="<|audio_pad|>", audio=np.zeros(16000, dtype=np.float32), return_tensors="pt")
    assert found["input_ids"].shape == (1, 13)
    assert processor.tokenizer.convert_tokens_to_ids("<asr_text>") > 255


# ------------------------------------------------------------------------------------------------------------- bad ones
def change_tensors(change):
    def tamper(directory):
        file = directory / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return tamper


def scale(tensors):
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.05


def drop(tensors):
    del tensors[next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))]


def cut_file(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lose_tokenizer(directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scale, r"log-probs differ from the trainer's by [\d.e-]+, more than 1e-05 .*; the export is kept"),
        (drop, r"does not load in a fresh process:[\s\S]*weights are missing: .*layers\.1\.mlp\.down_proj"),
    ],
)
def test_a_bad_export_is_refused(tmp_path, text, change, message):
    workers, probe = text
    (tmp_path / "step-000030").mkdir()
    with pytest.raises(CheckpointError, match=message):
        exports(tmp_path, workers, probe).write(60, Tampering(workers, change_tensors(change)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-000060.tmp", "step-000030"]  # kept for inspection


@pytest.mark.parametrize("damage", [cut_file, lose_tokenizer, change_tensors(drop)])
@pytest.mark.parametrize("kind", ["text", "speech", "original"])
def test_what_is_damaged_does_not_load(checkpoints, tmp_path, text, speech, kind, damage):
    """In this process: the fresh one runs the same function."""
    if kind == "original":
        workers, probe = trained(checkpoints, "native", export_layout="original")
    else:
        workers, probe = text if kind == "text" else speech
    workers.export(tmp_path / "out")
    probe_logprobs(tmp_path / "out", as_probe(probe))
    damage(tmp_path / "out")
    with pytest.raises((AttributeError, ModelError, OSError, SafetensorError, SystemExit)):
        probe_logprobs(tmp_path / "out", as_probe(probe))


def test_a_probe_of_several_clips_is_refused_rather_than_read_by_its_last(tmp_path, speech, capsys):
    workers, probe = speech
    workers.export(tmp_path / "out")
    asked = as_probe(replace(probe, media=(*probe.media, tiny.clip(3, 1.0))))
    with pytest.raises(SystemExit):
        probe_logprobs(tmp_path / "out", asked)
    assert "2 clips" in capsys.readouterr().err


# -------------------------------------------------------------------------------- the fresh process, played by a script
@pytest.fixture
def script(tmp_path, monkeypatch):
    """Stands in for the Python of the fresh process: a function that sets what it does, in shell."""

    def does(*lines):
        path = tmp_path / "python"
        path.write_text("\n".join(["#!/bin/sh", "cat > /dev/null", *lines]))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return does


def by_script(tmp_path, text, expected, timeout_s=60.0):
    workers, probe = text
    made = Exports(
        tmp_path / "hf", probe, lambda: np.asarray(expected), Sampling(), tolerance=0.01, timeout_s=timeout_s
    )
    return made.write(60, workers)


def test_the_last_line_counts_and_an_older_export_is_replaced(tmp_path, text, script):
    script("echo a library says hello", "echo '[-1.0, -2.0]'")
    for _ in range(2):
        assert by_script(tmp_path, text, [-1.0, -2.005]) == tmp_path / "hf/step-000060"
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["step-000060"]


@pytest.mark.parametrize(
    ("lines", "expected", "message"),
    [
        (["echo '[-1.0, -2.0]'"], [-1.0, -2.02], r"differ from the trainer's by 0\.02, more than 0\.01"),
        (["echo '[-1.0, NaN]'"], [-1.0, -2.0], "differ from the trainer's by nan"),
        (["echo '[-1.0, -2.0]'"], [-1.0, math.nan], "differ from the trainer's by nan"),
        (["echo no such tensor >&2", "exit 3"], [-1.0], "does not load in a fresh process:\nno such tensor"),
        (["kill -9 $$"], [-1.0], "does not load in a fresh process"),
        (["sleep 5"], [-1.0], "did not load in a fresh process within 0 s"),
    ],
)
def test_nothing_else_counts(tmp_path, text, script, lines, expected, message):
    script(*lines)
    with pytest.raises(CheckpointError, match=message):
        by_script(tmp_path, text, expected, timeout_s=0.3 if "sleep 5" in lines else 60.0)
    assert not list((tmp_path / "hf").glob("step-*"))


def test_export_changes_nothing_in_the_trainer(checkpoints, tmp_path):
    workers, probe = trained(checkpoints, "untied")
    before = score_one(workers, probe)
    workers.export(tmp_path / "out")
    assert torch.equal(torch.from_numpy(score_one(workers, probe)), torch.from_numpy(before))
    again = load_model(tmp_path / "out", dtype="float32").model
    assert again.lm_head.weight is not again.model.embed_tokens.weight
