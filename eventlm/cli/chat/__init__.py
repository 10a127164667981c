"""`eventlm chat`."""
