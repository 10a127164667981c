"""Compiles the libraries of `pyproject.toml` side by side, one on each core."""

from __future__ import annotations

from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibraries(build_ext):
    """They have the same sources: each one's object files need a folder of their own."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = True

    def build_extension(self, ext: Extension) -> None:
        apart = copy(self)
        apart.build_temp = str(Path(self.build_temp) / ext.name)
        super(BuildLibraries, apart).build_extension(ext)


setup(cmdclass={"build_ext": BuildLibraries})
