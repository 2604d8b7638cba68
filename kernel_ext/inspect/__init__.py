"""Values of a rank, taken apart into leaves that can be compared and shown."""
