"""Stage 2: prompts -> rollouts."""
