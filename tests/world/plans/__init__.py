"""What is drawn from a seed, and the faults to choose from."""
