"""Which reductions exist (``support``) and how they are computed on numpy buffers (``fold``, ``halves``, ``integers``)."""
