"""Stage 6: plan -> new weights."""
