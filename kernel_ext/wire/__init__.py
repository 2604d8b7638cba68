"""Messages between the notebook, its ranks and their fork server, and memory that they share; imports neither side."""
