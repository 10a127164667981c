"""Explanations: where the time of a request went."""
