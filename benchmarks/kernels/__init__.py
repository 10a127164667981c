"""What `benchmarks/gpu.py` measures of each kernel: a module an operation, with `cases(device, smoke=...)`."""
