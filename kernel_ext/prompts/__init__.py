"""Prompts of ranks: which ranks ask, whose turn it is, and what the user's answer means."""
