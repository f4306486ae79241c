"""What samples: the policy itself, or vLLM."""
