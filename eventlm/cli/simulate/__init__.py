"""`eventlm simulate`."""
