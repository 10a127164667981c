"""Reading a recorded run back: verification, and what a divergence means."""
