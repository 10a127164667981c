"""What the core costs, without a worker or a server."""
