"""What tracing tools see of a run: phases of sequences, and spans of requests. Pure folds over the log."""
