"""Reductions: those that exist (``support``), and their computation on numpy buffers (``fold``, ``integers``, ``adasum``)."""
