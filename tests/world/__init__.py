"""A simulated host in virtual time, on which the real server runs under faults that are drawn from a seed."""
