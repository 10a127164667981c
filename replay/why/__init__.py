"""Why a sequence is in no step at a position of a log, and what a plan did there."""
