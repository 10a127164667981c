"""`eventlm shrink`."""
