"""Front-end processes, which serve HTTP for an engine in another process."""
