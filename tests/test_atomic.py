"""Files that are replaced in one step: the old content or the new, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright import atomic
from meshwright.hardware.find import cluster
from meshwright.hardware.hardware_file import write
from meshwright.spec.errors import UserError


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_alone(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    atomic.write(path, "first")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        atomic.write(path, b"second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match=r"^--out: .* cannot be written \(No space left on device\)"):
        write(cluster("l4"), path)
    assert path.read_text() == "first"


def test_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content in ("a long first text", "é", b"\x00"):
        atomic.write(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_one_of_two_creates_a_file_and_the_other_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    atomic.create(path, "é", 0o600)
    with pytest.raises(FileExistsError):
        atomic.create(path, "other")
    assert path.read_text(encoding="utf-8") == "é" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_whole_is_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        atomic.create(tmp_path / "entry.json", "{}")
    assert not list(tmp_path.iterdir())
