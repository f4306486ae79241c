"""Recipes for schedulers: the Slurm script runs on stand-ins for what only a Slurm machine has; the RayJob is read."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

RECIPES = Path(__file__).parents[2] / "recipes" / "cluster"


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


STAND_INS = {
    "scontrol": 'printf "m1\\nm2\\nm3\\n"',
    "srun": 'while [ "${1#--}" != "$1" ]; do echo "srun $1" >> "$NOTES"; shift; done; exec "$@"',
    "skirl": r"""
echo "skirl $*" >> "$NOTES"
case "$2" in
up) case "$*" in
    *--block*) trap 'echo "worker ends" >> "$NOTES"; exit 0' TERM; while :; do sleep 0.05; done ;;
    *) echo "the head is up at 10.0.0.1:7000 (process 1, log x); no job server" ;;
    esac ;;
submit) trap 'echo "run ends" >> "$NOTES"; exit 130' TERM
    while [ ! -e "$GO" ]; do sleep 0.05; done; exit "$(cat "$GO")" ;;
esac
""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """The batch script running on stand-ins: (its process, what they were asked, the file that ends the run)."""
    places = tmp_path / "bin"
    places.mkdir()
    for name, body in STAND_INS.items():
        (places / name).write_text(f"#!/bin/bash\n{body}\n")
        (places / name).chmod(0o755)
    notes, go = tmp_path / "notes", tmp_path / "go"
    variables = {"SLURM_JOB_ID": f"test{os.getpid()}", "SLURM_JOB_NODELIST": "m[1-3]", "SLURM_CPUS_PER_TASK": "4"}
    process = subprocess.Popen(
        [RECIPES / "slurm.sh", "r.yaml", "--run.dir", "a b"],
        env={"PATH": f"{places}:{os.environ['PATH']}", "NOTES": str(notes), "GO": str(go), **variables},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + 10
    while not (notes.exists() and "submit" in notes.read_text() and "--block" in notes.read_text()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    yield process, notes, go
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("code", [0, 3])
def test_a_slurm_job_ends_with_its_run(slurm, code):
    process, notes, go = slurm
    go.write_text(str(code))
    assert process.wait(10) == code
    said = notes.read_text().splitlines()
    directory = f"/tmp/skirl-test{os.getpid()}"
    assert said[0] == f"skirl cluster up --port 0 --temp-dir {directory}"
    assert "srun --nodelist=m2,m3" in said
    assert "srun --ntasks=2" in said
    assert f"skirl cluster up --address 10.0.0.1:7000 --temp-dir {directory} --block" in said
    assert f"skirl cluster submit --temp-dir {directory} --nodes 3 --timeout 600 r.yaml --run.dir a b" in said
    assert said[-2:] == ["worker ends", f"skirl cluster down --temp-dir {directory} --force"]


def test_the_time_limit_ends_the_run_and_then_the_nodes(slurm):
    process, notes, _ = slurm
    process.terminate()  # as --signal=B:TERM does
    assert process.wait(10) == 143
    assert [line for line in notes.read_text().splitlines() if line.endswith("ends") or " down " in line] == [
        "run ends",
        "worker ends",
        f"skirl cluster down --temp-dir /tmp/skirl-test{os.getpid()} --force",
    ]


def test_the_rayjob_asks_for_what_the_document_says():
    (job,) = yaml.safe_load_all((RECIPES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert shlex.split(spec["entrypoint"])[:2] == ["skirl", "train"]
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    images = set()
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        images.add(container["image"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert all(isinstance(v, str) for v in {**group["rayStartParams"], **container["resources"]["limits"]}.values())
    assert len(images) == 1
    assert groups[1]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
