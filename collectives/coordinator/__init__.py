"""The coordinator: one small process per job that owns membership and order."""
