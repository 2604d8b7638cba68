"""Frames and messages of the control plane; no I/O here."""
