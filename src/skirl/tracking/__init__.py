"""Metrics, ledger, rollout store, sinks."""
