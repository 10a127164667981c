"""What runs on the simulated host: the server, its front ends and workers, other servers, and clients."""
