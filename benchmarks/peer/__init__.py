"""The engines that `benchmarks/peers.py` compares with: their set-up, checkpoints, servers and tables."""
