"""Where merged output is shown: a notebook, a terminal, or one tab for each rank."""
