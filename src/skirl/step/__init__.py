"""Between scores and plan: what each token of a response earns, and the streams that the loss needs beside it."""

from skirl.step.method import Batch, Method
from skirl.step.sequences import probe_sequence, rollout_sequence, score_one, supervised_sequence, value_one

__all__ = ["Batch", "Method", "probe_sequence", "rollout_sequence", "score_one", "supervised_sequence", "value_one"]
