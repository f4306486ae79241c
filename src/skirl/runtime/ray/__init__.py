"""Processes on a Ray cluster; the only home of Ray."""
