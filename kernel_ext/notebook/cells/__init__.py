"""A cell on the ranks: the state machine of one run, the shell that drives it, and its results."""
