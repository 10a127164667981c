"""The page of a run with its debugger, served on this machine only."""
