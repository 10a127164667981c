"""Replicas that are other servers: requests are forwarded to them, and their answers become facts."""
