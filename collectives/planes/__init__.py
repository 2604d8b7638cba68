"""Data planes: how bytes move between the ranks of a process set."""
