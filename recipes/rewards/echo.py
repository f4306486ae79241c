"""Reward of the echo task: the share of the reference's characters that the response has at the same place."""

from skirl.records import RewardSample


def reward(sample: RewardSample) -> float:
    """1 for the reference itself, 0 where no character agrees; a response that ends too soon misses the rest."""
    reference = sample.reference or ""
    agreeing = sum(a == b for a, b in zip(sample.text, reference, strict=False))
    return agreeing / len(reference)
