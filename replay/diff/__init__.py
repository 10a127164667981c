"""Two runs of one workload, compared."""
