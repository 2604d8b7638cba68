"""Reduction kernels on numpy buffers."""
