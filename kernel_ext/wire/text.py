"""Texts of users' objects, as messages can carry them."""

from __future__ import annotations


def wire_text(text: str) -> str:
    """The text as a plain ``str``, since the encoder of messages refuses subclasses; lone surrogates escaped.

    ``str(error)`` and ``_repr_html_`` may well return a subclass, such as ``numpy.str_``, ``markupsafe.Markup`` or the
    text that a data loader of torch makes of a ``KeyError``.
    """
    exact = str.__str__(text)
    return exact if exact.isascii() else exact.encode("utf-8", "backslashreplace").decode()
