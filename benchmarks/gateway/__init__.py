"""Benchmarks of the gateway: the server in front of other servers."""
