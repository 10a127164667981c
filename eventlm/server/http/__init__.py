"""HTTP itself: sockets, TLS, connections, middleware and server-sent events."""
