"""The side of a pool that runs in the notebook's (or a script's) process."""
