"""What takes over when the coordinator ends."""
