"""Ranks of a torchrun meet at a store that rank 0 holds, whatever others write into torchrun's own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from meshwright.comm.authentication import new_secret, write_secret
from meshwright.rank import network, rendezvous
from meshwright.rank.env import Worker
from meshwright.rank.rendezvous import FILE, SECRET, _given_secret, _reached_at, _read
from meshwright.spec import UserError

RANK = Worker(1, 2, 1, 2)


def test_a_path_that_anybody_may_have_given_names_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the user's with known content, such as a commit's name or nothing, is no secret."""
    monkeypatch.setattr(rendezvous, "SEEN_S", 0.2)
    secret = new_secret()
    file = tmp_path / f"{FILE}0123"
    write_secret(file, secret)
    assert _read(file, RANK, None) == secret
    known = tmp_path / "main"
    known.write_text("0" * 64)
    empty = tmp_path / f"{FILE}empty"
    empty.touch(0o600)
    link = tmp_path / f"{FILE}link"
    link.symlink_to(file)
    for other in (known, empty, link, tmp_path / f"{FILE}none", Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(UserError, match=rf"{SECRET}: rank 1 .* cannot read in {other}"):
            _read(other, RANK, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user's is made by root")
def test_another_users_file_is_taken_in_a_folder_where_no_others_write_alone(tmp_path: Path) -> None:
    """As on file systems that show other owners; in a folder of all users it may be anybody's."""
    file = tmp_path / f"{FILE}0123"
    write_secret(file, new_secret())
    os.chown(file, 65534, 65534)
    tmp_path.chmod(0o755)
    assert _read(file, RANK, tmp_path / "runs" / "mine")
    tmp_path.chmod(0o1777)
    with pytest.raises(UserError, match="another user"):
        _read(file, RANK, tmp_path / "runs" / "mine")
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match="another user"):
        _read(file, RANK, None)


@pytest.mark.parametrize("word", ["", "short", "0" * 15])
def test_a_word_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(SECRET, word)
    with pytest.raises(UserError, match=rf"^{SECRET}: a word of {len(word)} characters can be guessed"):
        _given_secret()
    monkeypatch.setenv(SECRET, "0123456789abcdef")
    assert len(_given_secret() or b"") == 32
    monkeypatch.delenv(SECRET)
    assert _given_secret() is None


@pytest.mark.parametrize(
    ("addresses", "interface", "expected"),
    [
        ({"127.0.0.1": "lo", "10.0.0.5": "eth0"}, "", ("10.0.0.5", "10.0.0.5")),
        ({"127.0.0.1": "lo", "10.0.0.5": "eth0", "172.17.0.1": "docker0"}, "", ("0.0.0.0", "localhost")),
        ({"127.0.0.1": "lo", "10.0.0.5": "eth0", "10.1.0.5": "ib0"}, "ib0", ("10.1.0.5", "10.1.0.5")),
    ],
)
def test_a_name_of_the_loopback_interface_is_not_where_others_come(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str], interface: str, expected: tuple[str, str]
) -> None:
    """A host's own name may be 127.0.1.1 there, and its real address elsewhere."""
    monkeypatch.setattr(network, "_addresses", lambda: addresses)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert _reached_at("localhost") == expected


def test_a_host_s_own_address_is_listened_on() -> None:
    own = next((address for address in network._addresses() if not address.startswith("127.")), None)
    if own is None:
        pytest.skip("this host has no address beside loopback")
    assert _reached_at(own) == (own, own)
    with socket.create_server((own, 0)):
        pass
