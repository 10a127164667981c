"""Processes that work through a list of things."""
