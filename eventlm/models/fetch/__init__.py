"""From a model's name to a checkpoint's folder: downloads, the cache, and what is made of a GGUF file."""
