"""What an engine leaves to the next one beside its log."""
