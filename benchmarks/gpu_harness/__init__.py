"""What the sections of `benchmarks/gpu.py` share: rows, timing, checkpoints, engines and processes."""
