"""The program of a pool's fork server."""
