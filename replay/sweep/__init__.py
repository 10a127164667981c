"""Many simulations, and the load that each configuration can take."""
