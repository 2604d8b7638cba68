"""A campaign of faults on real pools."""
