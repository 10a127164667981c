"""`eventlm view`."""
