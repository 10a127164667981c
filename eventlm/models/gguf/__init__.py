"""A GGUF file as a model: its header, its configuration and tokenizer as the files of a checkpoint, and its blocks."""
