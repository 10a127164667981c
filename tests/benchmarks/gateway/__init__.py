"""Benchmarks of the gateway."""
