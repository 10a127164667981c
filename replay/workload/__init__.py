"""Workloads: from recorded runs, files and public traces."""
