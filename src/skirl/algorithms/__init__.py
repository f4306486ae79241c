"""Stage 4: pure maths, torch only."""
