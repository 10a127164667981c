"""`eventlm bench`."""
