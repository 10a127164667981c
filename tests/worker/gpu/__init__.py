"""The runner for GPUs, on the CPU: its kernels run in Triton's interpreter, its CUDA graphs as what they hold."""
