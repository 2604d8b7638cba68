"""Live views of the event stream: widgets in a notebook, text in a terminal."""
