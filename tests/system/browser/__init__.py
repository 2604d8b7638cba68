"""A package, so that shared resources of its tests end with the last of them."""
