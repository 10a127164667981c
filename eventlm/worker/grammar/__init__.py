"""Grammars in the worker: matchers and the masks they give."""
