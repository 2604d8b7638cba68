"""The sockets of a library that shows none of them, found among this process's descriptors.

Other threads open and close files meanwhile, so these functions ask and do everything through a duplicate: the same number
may name another file a moment later.
"""

from __future__ import annotations

import _socket
import ctypes
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

_SO_ATTACH_FILTER = 26  # Linux; Python does not name it
_TCP_COUNTS = struct.Struct("120xQQ")  # Linux: bytes acknowledged and received, within struct tcp_info
# Linux: struct tcp_md5sig is a sockaddr_storage, flags, prefix length, key length, interface, and room for a key.
_TCP_MD5SIG_EXT = 32
_SOCKADDR_STORAGE, _MD5_KEY_LIMIT = 128, 80
_MD5_HEAD = struct.Struct("=BBHi")
_MD5_PREFIX = 1  # the flag that says that the prefix length counts: 0 for all addresses
_KEY = 32
_KNOCK_SECONDS = 0.2
_NUMBER = struct.Struct("=q")
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a packet filter of one instruction: return 0 bytes


_adopt = partial(_socket.socket, -1, -1, -1)  # finds out family and kind by asking the system


def _inet_sockets() -> Iterator[_socket.socket]:
    """Duplicates of this process's IP sockets, each closed after use."""
    for entry in os.listdir("/proc/self/fd"):
        if (duplicate := _duplicate(int(entry))) is None:
            continue
        with closing(duplicate):
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def _duplicate(fd: int) -> _socket.socket | None:
    """A socket object of its own for a descriptor; ``None`` if it is no socket, or closed meanwhile.

    Duplicating and keeping are one step of the interpreter: an interrupt of the main thread in between would leave the
    duplicate open for good.
    """
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return None
    except OSError:
        return None
    number, again = itertools.tee(map(os.dup, (fd,)))
    try:
        return next(map(_adopt, number))
    except OSError:  # closed meanwhile, or by now the number is that of another thread's file of another kind
        for own in again:
            os.close(own)
        return None


def listeners(address: str) -> set[tuple[str, int]]:
    """Address and port of each socket of this process that listens at this address."""
    return {
        sock.getsockname()[:2]
        for sock in _inet_sockets()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[0] == address
    }


def mentioned(ports: set[tuple[str, int]], text: bytes) -> set[tuple[str, int]]:
    """Those of the ``ports`` whose socket address (``struct sockaddr``) occurs in ``text``."""
    return {(host, port) for host, port in ports if _sockaddr(host, port) in text}


def _sockaddr(host: str, port: int) -> bytes:
    if ":" in host:
        return (
            struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + _packed(socket.AF_INET6, host)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + _packed(socket.AF_INET, host)


def _packed(family: int, host: str) -> bytes:
    return socket.inet_pton(family, host.partition("%")[0])


def shut_doors(ports: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Let no process connect to these listeners any more. They can't be closed: Gloo watches them until its end.

    Existing connections go on. A packet filter that drops everything is the cheapest way. Some systems refuse that
    to ordinary users; then the listener asks for segments that are signed with a key that no process has.

    Returns:
        The listeners that stay open, since the system offers neither.
    """
    instruction = ctypes.create_string_buffer(_DROP)
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    still_open: set[tuple[str, int]] = set()
    for sock in _inet_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[:2] in ports:
            try:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            except OSError:
                if not _ask_for_signatures(sock):
                    still_open.add(sock.getsockname()[:2])
    return still_open


def _ask_for_signatures(sock: _socket.socket) -> bool:
    """Have a listener take signed segments only (RFC 2385), from any address, with a key that is not kept.

    The kernel drops a stranger's first segment without an answer. False where the kernel can't do that.
    """
    anybody = struct.pack("=H", sock.family).ljust(_SOCKADDR_STORAGE, b"\0")
    key = os.urandom(_KEY)
    signature = anybody + _MD5_HEAD.pack(_MD5_PREFIX, 0, len(key), 0) + key.ljust(_MD5_KEY_LIMIT, b"\0")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, signature)
    except OSError:
        return False
    return True


def knock(ports: set[tuple[str, int]], members: int) -> None:
    """Connect to these listeners of Gloo's as each member that it may wait for, and leave at once.

    A process that connects says which of the listener's connections it is for; they are numbered from 0. Gloo keeps a connection for
    which it does not wait yet until it does.
    """
    for port in ports:
        for number in range(members):
            with suppress(OSError), socket.create_connection(port, _KNOCK_SECONDS) as sock:
                sock.sendall(_NUMBER.pack(number))


def connections() -> Iterator[tuple[_socket.socket, tuple[str, int], tuple[str, int]]]:
    """Duplicates of this process's connected IP sockets, each closed after use, with their own and the peer's address."""
    for sock in _inet_sockets():
        try:
            yield sock, sock.getsockname()[:2], sock.getpeername()[:2]
        except OSError:
            continue  # not connected


def traffic(
    ports: set[tuple[str, int]],
) -> dict[tuple[tuple[str, int], tuple[str, int]], int]:
    """Bytes that were sent and received over each connection with one of the ``ports`` at one end; empty if the system does not say.

    Bytes that were sent count once the other host has them.
    """
    counts = {}
    if hasattr(socket, "TCP_INFO"):
        for sock, local, peer in connections():
            if local in ports or peer in ports:
                with suppress(OSError, struct.error):  # ended meanwhile; a system that does not count
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_COUNTS.size)
                    counts[local, peer] = sum(_TCP_COUNTS.unpack(info))
    return counts
