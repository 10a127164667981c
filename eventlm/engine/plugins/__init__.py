"""Policies, batchers and routers: found by name, hashed, and reported when they fail."""
