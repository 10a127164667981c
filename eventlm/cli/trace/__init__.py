"""`eventlm trace`."""
