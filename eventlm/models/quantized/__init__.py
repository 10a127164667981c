"""What config.json says of quantized matrices, by the libraries that wrote the checkpoints."""
