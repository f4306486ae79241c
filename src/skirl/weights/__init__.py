"""Stage 7: trainer weights -> engines."""
