"""eventlm: a large-language-model inference engine that can be rewound."""

from eventlm._version import __version__

__all__ = ["__version__"]
