"""Checkpoints: whole or not there, the newest whole one is loaded, older ones go once a new one is safe."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from skirl.errors import CheckpointError
from skirl.training.checkpoint import Checkpoints

STATE = {"prompts": {"epoch": 2}, "ledger": {"issued": 7}}


def writer(content="weights"):
    def write(directory):
        (directory / "rank0").mkdir()
        (directory / "rank0/model.pt").write_text(content)
        (directory / "optimizer.pt").write_text(content * 3)

    return write


@pytest.fixture
def saved(tmp_path):
    """Steps 10, 20 and 30, all kept; their weights hold their step."""
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (10, 20, 30):
        checkpoints.save(step, writer(f"step {step}"), STATE)
    return checkpoints


def loaded(checkpoints):
    """(state, content of a weight file) of what is loaded, None where there is nothing."""
    found = []
    state = checkpoints.load_latest(lambda d: found.append((d / "rank0/model.pt").read_text()))
    return None if state is None else (state, *found)


def test_what_is_saved_is_loaded(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert loaded(checkpoints) is None
    path = checkpoints.save(40, writer(), STATE)
    assert path == tmp_path / "checkpoints/step-000040"
    assert loaded(checkpoints) == ({"step": 40, **STATE}, "weights")
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert files == {"rank0/model.pt": 7, "optimizer.pt": 21, "state.json": (path / "state.json").stat().st_size}
    assert [p.name for p in path.parent.iterdir()] == ["step-000040"]  # nothing is left aside


def test_the_newest_is_loaded(saved):
    assert saved.complete() == [10, 20, 30]
    assert loaded(saved) == ({"step": 30, **STATE}, "step 30")
    saved.save(1_000_000, writer("more digits"), STATE)  # by number, not by name
    assert loaded(saved)[1] == "more digits"


def test_old_ones_go_after_the_new_one_is_safe(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, writer(), STATE)
    assert checkpoints.complete() == [2, 3]

    def crash(directory):
        assert checkpoints.complete() == [2, 3]  # nothing goes before
        raise OSError("disk is full")

    with pytest.raises(CheckpointError, match=r"step-000004.tmp cannot be written: disk is full. Make room"):
        checkpoints.save(4, crash, STATE)
    assert checkpoints.complete() == [2, 3]
    checkpoints.save(4, writer(), STATE)
    assert checkpoints.complete() == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_checkpoint_is_on_the_disk_itself_before_it_counts_and_before_older_ones_go(tmp_path, monkeypatch):
    """A machine that loses power loses what the system had not written: every file, and the names that lead to it."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writer(), STATE)
    synced, calls, sync, rename, remove = set(), [], os.fsync, Path.rename, shutil.rmtree

    def noted_sync(descriptor):
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        sync(descriptor)

    def noted_rename(path, target):
        calls.append(("rename", set(synced)))
        return rename(path, target)

    def noted_remove(path, **options):
        if os.path.exists(path):
            calls.append((f"remove {os.path.relpath(path, tmp_path)}", set(synced)))
        remove(path, **options)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(shutil, "rmtree", noted_remove)
    checkpoints.save(2, writer(), STATE)
    [(first, before_rename), (last, before_removal)] = calls
    assert (first, last) == ("rename", "remove step-000001")
    files = ("rank0/model.pt", "optimizer.pt", "state.json", "manifest.json")
    assert before_rename == {".step-000002.tmp", ".step-000002.tmp/rank0", *(f".step-000002.tmp/{f}" for f in files)}
    assert before_removal - before_rename == {"."}


def test_an_old_one_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch, caplog):
    """A file server may hold a name back that another machine still reads."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writer(), STATE)
    remove = shutil.rmtree

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))
        remove(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert checkpoints.save(2, writer(), STATE).is_dir()
    assert "step-000001 cannot be deleted: Directory not empty" in caplog.text


def test_only_complete_ones_are_counted_and_deleted(tmp_path):
    """A broken one neither takes the place of a whole one nor is touched."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, writer(), STATE)
    (tmp_path / "step-000002/optimizer.pt").unlink()
    checkpoints.save(3, writer(), STATE)
    assert checkpoints.complete() == [1, 3]
    assert (tmp_path / "step-000002").is_dir()


@pytest.mark.parametrize("moment", ["files", "state", "manifest"])
def test_a_crash_while_writing_leaves_no_complete_checkpoint(saved, tmp_path, monkeypatch, moment):
    if moment == "files":

        def write(directory):
            (directory / "optimizer.pt").write_text("half")
            raise KeyboardInterrupt

    else:
        write = writer()
        dump = json.dump

        def dying(value, file, **options):
            if moment in file.name:
                file.write('{"step": 4')
                file.flush()
                raise KeyboardInterrupt
            dump(value, file, **options)

        monkeypatch.setattr(json, "dump", dying)
    with pytest.raises(KeyboardInterrupt):
        saved.save(40, write, STATE)
    monkeypatch.undo()
    assert saved.complete() == [10, 20, 30]
    assert not (tmp_path / "step-000040").exists()
    assert loaded(saved)[1] == "step 30"
    saved.save(40, writer("step 40"), STATE)  # what was left aside is no obstacle
    assert loaded(saved)[1] == "step 40"
    assert not (tmp_path / "step-000040/half").exists()


def damage_size(path):
    (path / "optimizer.pt").write_text("shorter")


def damage_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


DAMAGE = {
    "a file is cut": damage_size,
    "a file is gone": lambda path: (path / "rank0/model.pt").unlink(),
    "the state is gone": lambda path: (path / "state.json").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "the manifest is cut": damage_manifest,
    "the manifest is empty": lambda path: (path / "manifest.json").write_text(""),
    "the manifest is something else": lambda path: (path / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(saved, tmp_path, caplog, what):
    DAMAGE[what](tmp_path / "step-000030")
    with caplog.at_level(logging.WARNING):
        assert loaded(saved) == ({"step": 20, **STATE}, "step 20")
    assert "step-000030" in caplog.text
    assert "step-000020" not in caplog.text
    saved.save(30, writer("step 30 again"), STATE)  # and is replaced when its step comes again
    assert loaded(saved)[1] == "step 30 again"


def test_no_warning_where_all_are_whole(saved, caplog):
    loaded(saved)
    assert not caplog.records


def test_all_damaged_is_nothing(saved, tmp_path):
    for step in (10, 20, 30):
        damage_size(tmp_path / f"step-0000{step}")
    assert loaded(saved) is None


def test_other_names_are_left_alone(saved, tmp_path):
    shutil.copytree(tmp_path / "step-000030", tmp_path / "step-best")
    (tmp_path / "notes.txt").write_text("mine")
    Checkpoints(tmp_path, keep=1).save(40, writer(), STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000040", "step-best"]


def test_a_trainer_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="the trainer wrote no file"):
        Checkpoints(tmp_path, keep=1).save(1, lambda directory: None, STATE)
    assert Checkpoints(tmp_path, keep=1).complete() == []
