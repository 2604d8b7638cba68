"""The output of ranks, merged into one that can be read, and kept. No I/O but the transcript's, no clock."""
