"""`eventlm sweep`."""
