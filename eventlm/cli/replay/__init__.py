"""`eventlm replay`."""
