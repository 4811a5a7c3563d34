"""Messages between processes that share a secret: a handshake, then an authentication code for each.

Both sides prove that they know the secret, without sending it, by an HMAC (RFC 2104, with SHA-256) of random
bytes of both. Each message then has an HMAC over its direction, its number and its content, by a key of this
connection alone: none can be made, changed, repeated or left out on the way. They are not encrypted.

    server    16 random bytes
    client    16 random bytes, and HMAC(secret, "client", both random bytes)
    server    HMAC(secret, "server", both random bytes)
    either    length of the content (4 bytes), 16 bytes of HMAC(key, direction, number, content), content
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import struct
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshwright import atomic
from meshwright.spec import UserError

SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32
MAC_BYTES = 16
MOST_BYTES = 64 << 20
"""Longest message: a length above it is a mistake or an attack, and is refused before anything is read."""
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_HEAD = _LENGTH.size + MAC_BYTES


class AuthenticationError(RuntimeError):
    """A process that does not know the secret, or a message that was changed on its way."""


def new_secret() -> bytes:
    """A secret that nobody can guess."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(file: Path, secret: bytes) -> None:
    """Write a secret to a new file that only this user may read. Raises `FileExistsError`, `OSError`.

    The file is there with its whole content or not at all, also for a process that looks meanwhile.
    """
    atomic.create(file, secret.hex(), 0o600)


def read_secret(file: Path, *, trusted: bool = False) -> bytes:
    """The secret in a file of `write_secret`.

    Raises `OSError`, and `AuthenticationError` for what is no such file. Whose it is does not matter where
    its folder is `trusted`: some file systems of several hosts show other owners.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not trusted and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            raise AuthenticationError("it is another user's file, or others may read it")
        text = opened.read(2 * SECRET_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        if len(text) != 2 * SECRET_BYTES or not set(text) <= set(b"0123456789abcdef"):
            raise AuthenticationError(f"it does not hold a secret of {SECRET_BYTES} bytes")
        return bytes.fromhex(text.decode())


def shared_secret(file: Path) -> bytes:
    """The secret in `file`, in a folder of the run's processes, the first of which makes it.

    One that others could read, as in a folder that was copied, is closed to them, with a warning. Raises
    `UserError` where it cannot be read or made.
    """
    try:
        with suppress(FileExistsError):
            write_secret(file, new_secret())
        secret = read_secret(file, trusted=True)
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077:
            with suppress(OSError):  # a file system without modes, or another user's
                file.chmod(0o600)
            warnings.warn(
                f"{file}: other users could read the secret of this run (mode {mode:04o}), and with it "
                f"change what its processes tell each other; stop them, and remove the file for a new one",
                stacklevel=2,
            )
        return secret
    except (OSError, AuthenticationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"--out: {file}, the secret that the run's processes share, cannot be read or made ({reason}); "
            f"let all of them run as one user, and remove the file if it is damaged"
        ) from error


def pack(parts: Sequence[bytes]) -> bytes:
    """The content of a message of several parts."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def unpack(content: bytes) -> list[bytes]:
    """The parts of a message."""
    found, start = [], 0
    while start < len(content):
        (size,) = _LENGTH.unpack_from(content, start)
        start += _LENGTH.size
        found.append(content[start : start + size])
        start += size
    return found


class Codec:
    """One side of a connection after the handshake: what it sends and what it gets, in order."""

    def __init__(self, secret: bytes, nonces: bytes, *, client: bool) -> None:
        key = hmac.digest(secret, b"session" + nonces, "sha256")
        sides = hmac.new(key, b"client", "sha256"), hmac.new(key, b"server", "sha256")
        self._ours, self._theirs = sides if client else sides[::-1]
        self._sent = self._got = 0

    def seal(self, content: bytes) -> bytes:
        """The next message to send. Raises ValueError for one that is too long."""
        if len(content) > MOST_BYTES:
            raise ValueError(f"a message has {len(content)} bytes, more than {MOST_BYTES}")
        mac = _mac(self._ours, self._sent, content)
        self._sent += 1
        return b"".join((_LENGTH.pack(len(content)), mac, content))

    def open(self, buffer: bytearray) -> bytes | None:
        """The next message, taken out of what has come; None while it has not come as a whole.

        Raises `AuthenticationError`.
        """
        if len(buffer) < _HEAD:
            return None
        (size,) = _LENGTH.unpack_from(buffer)
        if size > MOST_BYTES:
            raise AuthenticationError(f"a message says that it has {size} bytes, more than any")
        if len(buffer) < _HEAD + size:
            return None
        content = bytes(memoryview(buffer)[_HEAD : _HEAD + size])
        if not hmac.compare_digest(_mac(self._theirs, self._got, content), buffer[_LENGTH.size : _HEAD]):
            raise AuthenticationError("a message was changed on its way")
        del buffer[: _HEAD + size]
        self._got += 1
        return content


def _mac(side: hmac.HMAC, number: int, content: bytes) -> bytes:
    made = side.copy()
    made.update(_NUMBER.pack(number))
    made.update(content)
    return made.digest()[:MAC_BYTES]


def proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    """Bytes by which a side ("client" or "server") proves that it knows the secret."""
    return hmac.digest(secret, side + nonces, "sha256")


def greet(connection: socket.socket, secret: bytes) -> Codec:
    """The client's side of the handshake on a new connection.

    Raises `AuthenticationError` where the server does not know the secret, `OSError` where it is gone.
    """
    theirs, own = receive_exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own + proof(secret, b"client", theirs + own))
    answer = receive_exactly(connection, PROOF_BYTES)
    if not hmac.compare_digest(answer, proof(secret, b"server", theirs + own)):
        raise AuthenticationError("it does not know the secret of this run")
    return Codec(secret, theirs + own, client=True)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes of a connection. Raises `OSError`, also where it ends before."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the connection was closed")
        found += part
    return bytes(found)
