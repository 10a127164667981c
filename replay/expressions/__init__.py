"""The language of conditions: of breakpoints and searches in a run, and of what a smaller workload must still show."""
