"""A host in virtual time: the real server runs on it, under faults that a seed draws."""
