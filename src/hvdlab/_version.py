"""The version of hvdlab, for modules of hvdlab: those that import the package root would close a circle, as it names them all."""

__version__ = "0.1.0"
