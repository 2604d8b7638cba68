"""Launching ranks: the command ``hvdlab run`` and the function ``hvdlab.run``."""
