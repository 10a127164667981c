"""What a seed draws, and the faults that it draws from."""
