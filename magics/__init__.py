"""IPython magics: parse, call ``hvdlab.kernel_ext``, display."""
