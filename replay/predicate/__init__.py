"""Conditions on a simulated run, and the processes that try them on many."""
