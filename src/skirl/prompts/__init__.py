"""Stage 1: data rows -> prompts."""
