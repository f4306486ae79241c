"""Stage 3: rollouts -> scores."""
