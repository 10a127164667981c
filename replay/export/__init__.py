"""Exports of a recorded run: tables, files for trace viewers, and spans for tracing backends."""
