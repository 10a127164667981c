"""The programs that run on the simulated host: the server, its front ends and workers, other servers, and clients."""
