"""Code that runs inside a rank: its agent, its cells and their output."""
