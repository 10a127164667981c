"""Runs in simulated time."""
