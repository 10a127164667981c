"""`eventlm bisect`."""
