"""What is wrong with a run, found in its index: each with figures, a culprit and where to look."""
