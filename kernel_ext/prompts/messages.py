"""The messages between a rank that wants input and the pool."""

from __future__ import annotations

from hvdlab.kernel_ext.payload import Payload

INPUT, PASSWORD, DEBUGGER = "input", "password", "debugger"
"""Kinds of questions: for a line, a line that is not shown while it is typed, a debugger's command."""

LONGEST_PROMPT = 2000
"""Characters of a prompt that are shown."""

AT_AN_END = "eof"
"""In place of an error's sentence: the user has ended the input."""


class PromptRequest(Payload, frozen=True):
    """A rank waits for a line from the user; sent again if it, or the answer, may have got lost.

    Attributes:
        cell: The id of the cell that asks.
        number: Distinguishes this rank's questions.
        kind: One of :data:`INPUT`, :data:`PASSWORD`, :data:`DEBUGGER`.
        prompt: The text in front of the input.
    """

    cell: str
    number: int
    kind: str
    prompt: str


class PromptWithdrawn(Payload, frozen=True):
    """A rank does not wait for this answer any more."""

    cell: str
    number: int


class Reply(Payload, frozen=True):
    """The answer to :class:`PromptRequest` with this number.

    Attributes:
        error: Empty, :data:`AT_AN_END`, or a sentence that says why there is no answer.
    """

    number: int
    text: str
    error: str = ""
