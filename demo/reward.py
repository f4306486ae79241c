"""Reward of the demo, as a user would write it: accuracy, keywords, language, smoothness, length, truncation.

Called in a process of its own for each sample; the parts are weighted by ``reward.weights`` in the recipe.
"""

from skirl.records import RewardSample
from skirl.rewards import speech


def reward(sample: RewardSample) -> dict[str, float | None]:
    """Named parts; None leaves a part out where it does not apply (no keyword in the row)."""
    return {
        "accuracy": speech.accuracy(sample, unit="char", clip=2.0),
        "keywords": speech.keywords(sample),
        "language": speech.language(sample),
        "smoothness": speech.repetition(sample, max_repeats=4),
        "length": speech.length(sample),
        "truncation": speech.truncation(sample),
    }
