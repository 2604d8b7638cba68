"""The span recorder and its exports."""
