"""Re-execution: the recorded schedule runs on the model again."""
