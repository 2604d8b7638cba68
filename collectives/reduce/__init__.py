"""Reductions on numpy buffers: folds (``fold``), averages of integers (``integers``) and Adasum (``adasum``)."""
