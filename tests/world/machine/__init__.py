"""The simulated host: its clock, loops, network, disk and processes."""
