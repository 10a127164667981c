"""What a step costs on a processor: its products, experts, draws and grammars, and the whole against its size."""
