"""A NaN on one rank ends the update on all of them, before the optimizer moves anything."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skirl.assemble import policy_objective
from skirl.config.load import load
from skirl.errors import TrainingDiverged
from skirl.planning.schedule import make_plan
from skirl.records import Sampling, TrainingSequence
from skirl.runtime.worker import WorkerSpec
from tests.e2e.recipes import GRPO, write_recipe


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_nan_advantage_on_one_rank(cluster: None, tiny_text: Path, tmp_path: Path, zero_stage: int) -> None:
    from skirl.runtime.ray.launch import launch

    flags = ["--runtime", "ray", "--trainer.backend", "deepspeed", f"--trainer.backend.zero_stage={zero_stage}"]
    config = load(write_recipe(tmp_path, tiny_text, **GRPO), [*flags, "--trainer.ranks", "2"]).config
    objective = policy_objective(config.method, Sampling())
    workers = launch(WorkerSpec(config, objective, 100, with_reference=True), "train", None)
    try:
        good = [
            TrainingSequence(str(i), np.arange(5 + i), np.arange(2, 5 + i), advantages=np.full(3 + i, 1.0 - i % 2 * 2))
            for i in range(4)
        ]
        plan = make_plan(good, num_ranks=2, max_tokens=64, normalizer="token")
        reference = workers.logprobs(plan, "reference")
        with_reference = [replace(s, reference_logprobs=r) for s, r in zip(good, reference, strict=True)]
        bad = [replace(with_reference[0], advantages=np.full(3, np.nan)), *with_reference[1:]]
        with pytest.raises(TrainingDiverged, match="weights and optimizer are as before the step"):
            workers.update(make_plan(bad, num_ranks=2, max_tokens=64, normalizer="token"), 1)
        after = workers.logprobs(plan, "policy")
        assert all((a == b).all() for a, b in zip(reference, after, strict=True))
    finally:
        workers.shutdown()
