"""Simulation: the real core, a virtual clock and a cost model."""
