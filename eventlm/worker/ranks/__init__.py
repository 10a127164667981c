"""Ranks of one replica: what each has of the model, and how they exchange what they compute."""
