"""Tests of the Triton kernels: what they compute, in the interpreter, and that they compile for a GPU."""
