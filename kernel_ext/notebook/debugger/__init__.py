"""JupyterLab's debugger over ranks."""
