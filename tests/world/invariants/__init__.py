"""The invariants of every world, and how they are checked."""
