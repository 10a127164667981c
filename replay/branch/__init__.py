"""Branches: from a drain of a recorded run on, what remains of it under another engine."""
