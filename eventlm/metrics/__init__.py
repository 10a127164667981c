"""Metrics: a projection of the event log, and its Prometheus families."""
