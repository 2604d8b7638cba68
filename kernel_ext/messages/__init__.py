"""The messages between the pool and its ranks, by subject; ``payloads`` has all of them together."""
