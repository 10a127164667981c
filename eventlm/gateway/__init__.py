"""Clients of other servers, whose answers the engine takes for those of a replica."""
