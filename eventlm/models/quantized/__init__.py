"""Checkpoints whose matrices are quantized: how config.json describes them, how they lie in files, what they hold."""
