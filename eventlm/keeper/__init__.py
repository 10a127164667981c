"""The keeper: the process that keeps an engine running. It holds sockets and processes, and sees no request."""
