"""The pure core: `Core.apply(event) -> decisions`. No clock, no I/O, no threads, no randomness, no float decides."""
