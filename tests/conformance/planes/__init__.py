"""A package, so that resident workers end with the last test that uses them."""
