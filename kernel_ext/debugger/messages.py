"""Mail between the notebook and the debug servers of ranks.

What a frontend and a rank's debug server say to each other is the Debug Adapter Protocol, one message of JSON in each
:class:`Said`. It travels through the connection that the rank has anyway: nothing listens for it.
"""

from __future__ import annotations

import msgspec

from hvdlab.kernel_ext.payload import Payload

DEBUG = "hvdlab.pool.debug"
"""Topic of this mail, in both directions."""


class Open(Payload, frozen=True):
    """Notebook to rank: start the debug server, if it is not there, for a session of this number."""

    session: int


class Opened(Payload, frozen=True):
    """Rank to notebook: the debug server takes messages; or, with an ``error``, it does not."""

    session: int
    error: str = ""


class Said(Payload, frozen=True):
    """One message of the Debug Adapter Protocol, as JSON."""

    session: int
    message: bytes


class Close(Payload, frozen=True):
    """Notebook to rank: the session has ended; whatever is stopped goes on."""

    session: int


ToServer = Open | Said | Close
FromServer = Opened | Said

decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode
