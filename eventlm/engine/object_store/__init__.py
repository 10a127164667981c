"""What the server keeps between requests: opaque objects of their owners, bounded in number, bytes and time."""
