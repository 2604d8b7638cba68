"""Prompts of ranks: who asks, whose turn it is, and what the user's answer means."""
