"""The rank engine: the state, the threads and the data planes that a rank has beside the user's thread."""
