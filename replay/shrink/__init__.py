"""The smallest workload that still shows a problem."""
