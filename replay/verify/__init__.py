"""Verification: every decision of a trace is made again and compared."""
