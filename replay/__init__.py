"""What can be done with a recorded run: verify, explain, re-execute, compare, and ask what-if."""
