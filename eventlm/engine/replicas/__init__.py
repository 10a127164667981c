"""Replicas and their worker processes: started, watched, restarted."""
