"""The rank engine: what a rank runs beside the user's thread."""
