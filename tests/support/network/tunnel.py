"""A tunnel between two hosts of :mod:`support.network.namespaces`, as WireGuard's, for kernels that have none.

``python tests/support/network/tunnel.py OWN PEER PORT KEY``: packets for the network of the address OWN (``10.8.0.1/24``) go to the host PEER in UDP, encrypted and
authenticated with the key (hex), and packets from there are decrypted. Prints ``up``; ends with its input.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_NONCE = 12  # bytes, before each encrypted packet
_MTU = 1400  # bytes: leaves room for UDP, the nonce and the tag below 1500


def main(own: str, peer: str, port: str, key: str) -> None:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tunnel", _IFF_TUN | _IFF_NO_PI))
    for words in (f"address add {own} dev tunnel", f"link set tunnel mtu {_MTU} up"):
        subprocess.run(["ip", *words.split()], check=True)
    cipher = AESGCM(bytes.fromhex(key))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind(("0.0.0.0", int(port)))
        wire.setblocking(False)
        print("up", flush=True)
        while True:
            ready, _, _ = select.select([device, wire, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            if device in ready:
                nonce = os.urandom(_NONCE)
                wire.sendto(nonce + cipher.encrypt(nonce, os.read(device, 65536), None), (peer, int(port)))
            if wire in ready:
                packet, (sender, _) = wire.recvfrom(65536)
                try:
                    if sender == peer:
                        os.write(device, cipher.decrypt(packet[:_NONCE], packet[_NONCE:], None))
                except InvalidTag:
                    continue  # not from a holder of the key


if __name__ == "__main__":
    main(*sys.argv[1:])
