"""Launches that must compile for a GPU: each module has `launches()`, (name, call) of the kernels of one operation.

The calls are made with tensors on the CPU under `tests.kernels.gpu.fake_driver`: kernels are compiled, none runs.
"""
