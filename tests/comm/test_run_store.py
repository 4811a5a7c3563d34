"""The store of a run does what torch's does, for those who know its secret, and nothing for anybody else."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshwright.comm import store_server
from meshwright.comm.authentication import (
    AuthenticationError,
    Codec,
    new_secret,
    read_secret,
    shared_secret,
    write_secret,
)
from meshwright.comm.store import AuthenticatedStore
from meshwright.comm.store_server import StoreServer
from meshwright.spec import UserError

SECRET = new_secret()
SHORT = timedelta(seconds=0.2)


@pytest.fixture(params=["address", "folder"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1" if request.param == "address" else tmp_path, SECRET)
    yield made
    made.close()


def client(server: StoreServer, timeout: timedelta = SHORT) -> AuthenticatedStore:
    return AuthenticatedStore(server.endpoint, SECRET, timeout)


OPERATIONS: list[Callable[[Any, str, str, str, int], Any]] = [
    lambda store, key, other, value, number: store.set(key, value),
    lambda store, key, other, value, number: store.get(key),
    lambda store, key, other, value, number: store.append(key, value),
    lambda store, key, other, value, number: store.check([key, other]),
    lambda store, key, other, value, number: store.compare_set(key, "", value),
    lambda store, key, other, value, number: store.compare_set(key, "x", value),
    lambda store, key, other, value, number: store.delete_key(key),
    lambda store, key, other, value, number: store.add(f"number {key}", number),
    lambda store, key, other, value, number: store.get(f"number {key}"),
    lambda store, key, other, value, number: store.multi_get([key, other]),
    lambda store, key, other, value, number: store.multi_set([key, other], [value, value]),
]


def outcome(operation: Callable[..., Any], store: Any, *given: Any) -> Any:
    """Return the result of an operation, or the kind of its error."""
    try:
        return operation(store, *given)
    except dist.DistStoreError:
        return "no such key in time"


def test_operations_are_those_of_torchs_store(server: StoreServer) -> None:
    """A few hundred drawn operations, on it and on torch's server, as it is and under a prefix."""
    limit, draw = timedelta(seconds=0.1), random.Random(0)  # both answer in time on a busy machine
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    ours = client(server, limit)
    pairs: list[tuple[Any, Any]] = [(ours, theirs), (PrefixStore("p", ours), PrefixStore("p", theirs))]
    for _ in range(200):
        mine, other = draw.choice(pairs)
        operation = draw.choice(OPERATIONS)
        given = (
            draw.choice("abc"),
            draw.choice("abc"),
            draw.choice(["", "x", "\u00e9" * 3, "7"]),
            draw.randrange(-3, 9),
        )
        assert outcome(operation, mine, *given) == outcome(operation, other, *given), given
    assert ours.num_keys() > 3


def test_who_waits_is_woken_by_the_last_key(server: StoreServer) -> None:
    waiting, setting, found = client(server, timedelta(seconds=20)), client(server), list[Any]()
    thread = threading.Thread(target=lambda: found.append(waiting.multi_get(["a", "b"])))
    thread.start()
    setting.set("a", "1")
    time.sleep(0.05)
    assert not found
    setting.set("b", "2")
    thread.join(10)
    assert found == [[b"1", b"2"]]


def test_a_wait_ends_in_time_and_the_connection_goes_on(server: StoreServer) -> None:
    store, begun = client(server), time.monotonic()
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms, keys: none, nor this"):
        store.wait(["none", "nor this"])
    assert 0.15 < time.monotonic() - begun < 5
    store.set("none", "")
    assert store.check(["none"])


def test_values_of_many_megabytes_arrive(server: StoreServer) -> None:
    value = os.urandom(9 << 20)
    store = client(server, timedelta(seconds=20))
    store.set("large", value)
    assert store.get("large") == value


def test_a_clone_waits_beside_its_store(server: StoreServer) -> None:
    store = client(server, timedelta(seconds=20))
    copy = PrefixStore("p", store).clone()
    thread = threading.Thread(target=lambda: store.wait(["p/late"]))
    thread.start()
    copy.set("late", "x")
    thread.join(10)
    assert not thread.is_alive()


def test_a_server_that_is_gone_is_an_error(server: StoreServer) -> None:
    store = client(server)
    server.close()
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="the store at"):
            store.set("a", "1")


def test_without_the_secret_nothing_is_answered_and_the_user_is_named(server: StoreServer) -> None:
    store = client(server)
    store.set("a", "1")
    with pytest.warns(UserWarning, match=f"user {os.getuid()}.* without knowing its secret") as told:
        for _ in range(3):
            with pytest.raises(dist.DistNetworkError):
                AuthenticatedStore(server.endpoint, new_secret())
        wait_until(lambda: server.refused == 3 and heard(told))
    assert store.get("a") == b"1" and store.num_keys() == 1


def test_a_server_without_the_secret_is_found_out() -> None:
    """Who takes the port of a store gets nothing from its ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        got = bytearray()

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\0" * 16)
                while len(got) < 48:
                    got.extend(connection.recv(48))
                connection.sendall(b"\0" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(dist.DistNetworkError, match="does not know the secret"):
            AuthenticatedStore(f"127.0.0.1:{listener.getsockname()[1]}", SECRET)
        thread.join(10)
    assert SECRET not in got


def heard(told: Sequence[warnings.WarningMessage]) -> bool:
    return any("was refused" in str(each.message) for each in told)


def wait_until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not so():
        assert time.monotonic() < end
        time.sleep(0.01)


class Relay:
    """A process between a client and the server, which may change what it passes on to the server."""

    def __init__(self, server: StoreServer, change: Callable[[int, bytes], bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        host, port = server.endpoint.rsplit(":", 1)
        self._onward = socket.create_connection((host, int(port)))
        self._change = change
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        threading.Thread(target=self._back, args=(connection,), daemon=True).start()
        number = 0
        while part := connection.recv(1 << 16):
            self._onward.sendall(self._change(number, part))
            number += 1

    def _back(self, connection: socket.socket) -> None:
        while part := self._onward.recv(1 << 16):
            connection.sendall(part)
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("kind", "counted"), [("changed", 0), ("repeated", 5)])
def test_a_message_on_its_way_cannot_be_changed_or_repeated(kind: str, counted: int) -> None:
    server = StoreServer("127.0.0.1", SECRET)

    def change(number: int, part: bytes) -> bytes:
        if number != 2:  # the proof, one message, and then this one
            return part
        return part + part if kind == "repeated" else part[:-1] + bytes([part[-1] ^ 1])

    store = AuthenticatedStore(Relay(server, change).endpoint, SECRET, SHORT)
    store.set("a", "1")
    with pytest.warns(UserWarning, match="was refused") as told:
        with pytest.raises(dist.DistNetworkError):
            store.add("n", 5)
        wait_until(lambda: heard(told))
    assert AuthenticatedStore(server.endpoint, SECRET, SHORT).add("n", 0) == counted
    server.close()


def test_a_code_depends_on_direction_and_number() -> None:
    nonces = os.urandom(32)
    ours, theirs = Codec(SECRET, nonces, client=True), Codec(SECRET, nonces, client=False)
    first, second = ours.seal(b"a"), ours.seal(b"a")
    assert first != second
    assert theirs.open(bytearray(first)) == b"a"
    with pytest.raises(AuthenticationError):
        theirs.open(bytearray(first))
    with pytest.raises(AuthenticationError):  # sent back
        Codec(SECRET, nonces, client=True).open(bytearray(first))
    with pytest.raises(AuthenticationError, match="bytes"):
        theirs.open(bytearray(b"\xff" * 64))


def test_strangers_that_stay_are_closed_and_ranks_still_connect(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MOST_STRANGERS", 8)
    left = []
    with pytest.warns(UserWarning, match="was refused; the run is not affected") as told:
        for _ in range(40):
            if server.endpoint.startswith("/"):
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(server.endpoint)
            else:
                host, port = server.endpoint.rsplit(":", 1)
                stranger = socket.create_connection((host, int(port)))
            left.append(stranger)
        assert client(server).add("a", 1) == 1
        wait_until(lambda: server.refused >= 32 and heard(told))
    for stranger in left:
        stranger.close()


def test_a_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert shared_secret(file) == shared_secret(file) == read_secret(file)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_secret(file, SECRET)
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match="link"):
        read_secret(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user's is made by root")
def test_another_users_secret_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    write_secret(file, SECRET)
    os.chown(file, 65534, 65534)
    with pytest.raises(AuthenticationError, match="another user"):
        read_secret(file)
    assert read_secret(file, trusted=True) == SECRET


@pytest.mark.parametrize("content", ["", "ab", "0" * 63, "0" * 65, "z" * 64, "0" * 32 + " " + "0" * 31])
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(content)
    for trusted in (False, True):
        with pytest.raises(AuthenticationError, match="does not hold a secret"):
            read_secret(file, trusted=trusted)


def test_a_pipe_and_a_file_that_others_read_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(AuthenticationError, match="does not hold a secret"):
        read_secret(tmp_path / "pipe")
    write_secret(tmp_path / "secret", SECRET)
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(AuthenticationError, match="others may read it"):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize("content", ["", "ab", "A" * 64])
def test_a_damaged_secret_of_a_run_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "secret").write_text(content)
    words = r"--out: .*secret, .* cannot be read or made \(it does not hold a secret .*remove the file"
    with pytest.raises(UserError, match=words):
        shared_secret(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        shared_secret(tmp_path / "link")


def test_a_secret_of_a_run_that_others_could_read_is_told_and_closed(tmp_path: Path) -> None:
    secret = shared_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o644)  # as a copy of the folder has it
    with pytest.warns(UserWarning, match=r"other users could read the secret of this run \(mode 0644\)"):
        assert shared_secret(tmp_path / "secret") == secret
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shared_secret(tmp_path / "secret") == secret


def test_a_bad_request_ends_its_connection_alone(server: StoreServer) -> None:
    """They take the secret, as a rank of another version would have it."""
    store = client(server)
    for parts in (
        [],
        [b"append", b"a"],
        [b"get", b"nan", b"a"],
        [b"get", b"x", b"a"],
        [b"nothing"],
        [b"add", b"a"],
    ):
        with pytest.raises(dist.DistNetworkError):
            store._exchange(parts, 0.0)
    waiting = client(server, timedelta(days=400))
    thread = threading.Thread(target=lambda: waiting.wait(["late"]))
    thread.start()
    store.set("late", "")
    thread.join(10)
    assert not thread.is_alive()


def test_warnings_that_are_errors_end_no_server() -> None:
    program = """
import socket, sys, time, warnings
from meshwright.comm.store_server import StoreServer
server = StoreServer("127.0.0.1")
for _ in range(3):
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"0" * 64)
        stranger.settimeout(5)
        while stranger.recv(64):
            pass
assert server.refused == 3 and server._thread.is_alive()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)


def test_ended_waits_do_not_pile_up(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MOST_ENDED", 10)
    waiting, setting = client(server, timedelta(minutes=5)), client(server)
    for number in range(60):
        thread = threading.Thread(target=lambda number=number: waiting.wait([f"key {number}"]))  # type: ignore[misc]
        thread.start()
        time.sleep(0.002)
        setting.set(f"key {number}", "")
        thread.join(10)
    assert len(server._deadlines) <= 20


def test_a_server_needs_no_torch() -> None:
    """Nothing that supervises ranks waits for torch's import before it has a store for them."""
    program = "import meshwright.comm.store_server, sys; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
