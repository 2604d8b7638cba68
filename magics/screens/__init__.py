"""Where merged output is shown: a notebook or a terminal."""
