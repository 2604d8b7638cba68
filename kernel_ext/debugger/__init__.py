"""The debugger of JupyterLab and VS Code in ranks."""
