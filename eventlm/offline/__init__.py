"""Inference without a server: `LLM` and what it takes and gives."""
