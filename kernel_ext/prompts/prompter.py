"""Asking the user, wherever that is: a notebook, a console, a terminal."""

from __future__ import annotations

import builtins
import getpass
from typing import Protocol

from IPython.core.error import StdinNotImplementedError

NO_STDIN = (
    "{what} can't ask: what runs this notebook takes no input (as nbclient, nbconvert and papermill, and "
    "frontends that do not allow stdin). Set the value in the cell, or bring it with %hvd_push"
)
IN_BACKGROUND = "{what} can't ask from a cell in the background; run the cell without --background, or bring the value with %hvd_push"
NOBODY = "{what} can't ask: no notebook waits for this cell any more"


class Prompter(Protocol):
    """Asks the user for a line.

    Attributes:
        shows_beside: Whether the question leaves room for the cell's output, and for a line that says which ranks are at a
            prompt. A terminal's does not: output would tear what the user has typed so far.
    """

    shows_beside: bool

    def ask(self, prompt: str, *, hidden: bool) -> str:
        """A line from the user; if ``hidden``, it is not shown while it is typed.

        Raises:
            EOFError: The user has ended the input.
            KeyboardInterrupt: The user has interrupted.
            StdinNotImplementedError: No user can be asked here.
        """
        ...


class ProcessPrompter:
    """Asks where this process has its input: in a Jupyter kernel that is the frontend's own input box.

    Args:
        shows_beside: As in :class:`Prompter`.
    """

    def __init__(self, *, shows_beside: bool = False) -> None:
        self.shows_beside = shows_beside

    def ask(self, prompt: str, *, hidden: bool) -> str:
        try:
            # Looked up when it is needed: a kernel puts its own functions there while a cell runs.
            return getpass.getpass(prompt) if hidden else builtins.input(prompt)
        except OSError as error:  # stdin is closed, or no terminal
            raise StdinNotImplementedError(str(error)) from None
