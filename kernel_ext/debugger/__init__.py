"""JupyterLab's debugger in ranks."""
