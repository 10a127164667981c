"""Beam search as requests of one token each: its fields, which beams are kept, and the search itself."""
