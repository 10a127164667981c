"""Steps on a GPU: planned ahead, staged in one copy, computed by Triton kernels and CUDA graphs, answered later."""
