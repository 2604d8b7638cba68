"""Live views of the event stream."""
