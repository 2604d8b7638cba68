"""Sniffer on the way: reads all frames of its network.

``python tests/support/network/sniffer.py INTERFACE HEX...`` prints ``up``, reads until its input ends, and prints for each text, given in
hex, whether it was seen, in JSON.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading

_ALL = 0x0003  # ETH_P_ALL


class Sniffer:
    """Reads until :meth:`close`.

    Args:
        interface: The interface to listen at; all, if it is empty.
    """

    def __init__(self, interface: str = "") -> None:
        self._frames: list[bytes] = []
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        if interface:
            self._socket.bind((interface, _ALL))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()  # then a last look
            while select.select([self._socket], [], [], 0.05)[0]:
                self._frames.append(self._socket.recv(1 << 18))

    def close(self) -> bytes:
        """Close it, and return all that was seen."""
        self._over.set()
        self._thread.join()
        self._socket.close()
        return b"".join(self._frames)


def main(interface: str, *texts: str) -> None:
    sniffer = Sniffer(interface)
    print("up", flush=True)
    sys.stdin.read()
    seen = sniffer.close()
    print(json.dumps([bytes.fromhex(text) in seen for text in texts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
