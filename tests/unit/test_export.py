"""Exports count once a fresh process gives the same log-probs; a damaged one is refused and leaves no hf/step-*."""

import json
import logging
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.errors import CheckpointError
from skirl.models.loading import load_model
from skirl.models.verify import probe_logprobs
from skirl.records import Media, Sampling
from skirl.step import score_one
from skirl.training.export import Exports
from skirl.training.objective import SupervisedObjective
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
    return Exports(
        directory, probe, lambda: score_one(workers, probe), sampling or Sampling(), tolerance=tolerance
    )


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


# ----------------------------------------------------------------------------------------------------------- good ones
@pytest.mark.parametrize("kind", ["tied", "native to original"])
def test_an_export_is_reloaded_in_a_fresh_process(checkpoints, tmp_path, caplog, kind, record_property):
    """Through a real process, once for each of the two ways to load."""
    name, model = KINDS[kind]
    workers, probe = trained(checkpoints, name, **model)
    with caplog.at_level(logging.INFO, logger="skirl.training.export"):
        path = exports(tmp_path, workers, probe).write(60, workers)
    assert path == tmp_path / "step-000060"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000060"]
    difference = float(re.search(r"largest difference of log-probs (\S+)", caplog.text)[1])
    record_property(f"export_vs_trainer/{kind}", difference)
    assert difference < TOLERANCE
    changed = exports(tmp_path, workers, probe).write(60, workers)  # the same step again replaces it
    assert changed == path


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


def test_clips_in_memory_are_probed_too(checkpoints, tmp_path, speech):
    """Rows of Parquet tables have no file."""
    from dataclasses import replace
    from pathlib import Path

    workers, probe = speech
    clip = probe.media[0]
    inside = Media("table.parquet:row 1(audio)", clip.start_s, clip.duration_s, Path(clip.path).read_bytes())
    probe = replace(probe, media=(inside,))
    assert exports(tmp_path, workers, probe).write(1, workers).is_dir()


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
    del tensors["model.layers.1.mlp.down_proj.weight"]


def cut_file(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lose_tokenizer(directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()


BAD = {
    "changed weights": (change_tensors(scale), r"log-probs differ from the trainer's by [\d.e-]+, more than 1e-05"),
    "a tensor is missing": (change_tensors(drop), r"does not load in a fresh process:[\s\S]*down_proj"),
    "a file is cut": (cut_file, "does not load in a fresh process"),
    "no tokenizer": (lose_tokenizer, "does not load in a fresh process"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_export_is_refused(tmp_path, text, what):
    workers, probe = text
    change, message = BAD[what]
    with pytest.raises(CheckpointError, match=message):
        exports(tmp_path, workers, probe).write(60, Tampering(workers, change))
    assert not list(tmp_path.glob("step-*"))
    assert [p.name for p in tmp_path.iterdir()] == [".step-000060.tmp"]  # kept for inspection


def test_a_bad_export_leaves_older_ones_and_is_no_obstacle(tmp_path, text):
    workers, probe = text
    (tmp_path / "step-000030").mkdir()
    with pytest.raises(CheckpointError):
        exports(tmp_path, workers, probe).write(60, Tampering(workers, cut_file))
    exports(tmp_path, workers, probe).write(60, workers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000030", "step-000060"]


def test_log_probs_that_are_not_finite_are_refused(tmp_path, text):
    workers, probe = text
    nan = Exports(tmp_path, probe, lambda: np.full(probe.num_actions, np.nan), Sampling(), tolerance=1.0)
    with pytest.raises(CheckpointError, match="differ from the trainer's by nan"):
        nan.write(1, workers)


def test_a_load_that_takes_too_long_is_refused(tmp_path, text):
    workers, probe = text
    hasty = Exports(
        tmp_path, probe, lambda: score_one(workers, probe), Sampling(), tolerance=TOLERANCE, timeout_s=0.05
    )
    with pytest.raises(CheckpointError, match=r"did not load in a fresh process within 0 s"):
        hasty.write(1, workers)


def test_export_changes_nothing_in_the_trainer(checkpoints, tmp_path):
    workers, probe = trained(checkpoints, "untied")
    before = score_one(workers, probe)
    workers.export(tmp_path / "out")
    assert torch.equal(torch.from_numpy(score_one(workers, probe)), torch.from_numpy(before))
    again = load_model(tmp_path / "out", dtype="float32").model
    assert again.lm_head.weight is not again.model.embed_tokens.weight
