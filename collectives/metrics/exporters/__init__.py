"""Exporters for the usual trackers. Each imports its package when it is made."""
