"""Prompts of ranks: their order, and the meaning of the user's answer."""
