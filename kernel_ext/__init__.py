"""A pool of ranks: its side in the notebook, its side in a rank, and the messages between both."""
