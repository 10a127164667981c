"""`eventlm serve`."""
