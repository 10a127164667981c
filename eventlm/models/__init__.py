"""Models: what a checkpoint computes, its weights, and the decoders that run it."""
