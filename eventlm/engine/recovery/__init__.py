"""Going on with the run of an engine that has died."""
