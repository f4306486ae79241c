"""skirl: reinforcement-learning post-training for text and speech language models."""

__all__ = ["__version__"]

__version__ = "0.1.0"
