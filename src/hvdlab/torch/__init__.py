"""Horovod's torch API on hvdlab's collective core."""
