"""What another engine would have done with a recorded run's work."""
