"""What the pool and its ranks say to each other, by what it is about; all of it together is in ``payloads``."""
