"""`eventlm report`."""
