"""Held-out scoring."""
