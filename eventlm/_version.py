"""The version of the code, written into every trace's header."""

__version__ = "0.1.0"
