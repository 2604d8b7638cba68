"""The notebook side of a pool: ranks, their cells, output, interrupts."""
