"""A decoder's weights: which there are, where they lie in a checkpoint's files, and how they are read."""
