from __future__ import annotations

import re
import subprocess
import threading
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from meshwright import cpp_library
from meshwright.cpp_library import SWITCH, CppLibrary, cache_folder

WITHOUT = "sums are slow"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CppLibrary:
    """A library of one source, and a cache of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    header, source = tmp_path / "three.h", tmp_path / "sum.cpp"
    header.write_text("constexpr int three = 3;\n")
    source.write_text('#include "three.h"\nextern "C" int sum(int a) { return a + three; }\n')
    return CppLibrary("sum", (source,), headers=(header,))


def test_it_is_compiled_once_for_each_content(library: CppLibrary) -> None:
    loaded = library.load(WITHOUT)
    assert loaded is not None and loaded.sum(4) == 7
    with patch.object(subprocess, "run", side_effect=AssertionError):
        assert library.load(WITHOUT) is not None
    library.headers[0].write_text("constexpr int three = 4;\n")
    changed = library.load(WITHOUT)
    assert changed is not None and changed.sum(4) == 8


@pytest.mark.parametrize("size", [0, 100, 4096, None])
def test_a_damaged_library_is_compiled_again(library: CppLibrary, size: int | None) -> None:
    """To load it would kill the process by SIGBUS or SIGSEGV."""
    path = library.build(cache_folder())
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(len(content) - 4096) if size is None else content[:size])
    loaded = library.load(WITHOUT)
    assert loaded is not None and loaded.sum(4) == 7
    assert len(list(cache_folder().glob("*.so"))) == 1 and path.read_bytes() == content


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("g++ 'x", "CXX: .*cannot be read .No closing quotation.; install g\\+\\+"),
        ("/", "Permission denied: '/'; install g\\+\\+"),
        ("false", "false has ended with exit code 1; install g\\+\\+"),
        ("true", "true has made no file; install g\\+\\+"),
        ("no-compiler", "No such file or directory: 'no-compiler'; install g\\+\\+"),
    ],
)
def test_a_compiler_that_fails_is_told(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=f"{WITHOUT}: .*{words}"):
        assert library.load(WITHOUT) is None


def test_a_cache_that_cannot_be_written_is_told(library: CppLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(library.sources[0]))
    with pytest.warns(UserWarning, match=f"Not a directory.*make {cache_folder()} a folder that can be"):
        assert library.load(WITHOUT) is None


def test_a_blank_compiler_is_the_default_one(library: CppLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", " ")
    assert library.load(WITHOUT) is not None


def test_a_user_without_a_home_folder_is_told(library: CppLibrary) -> None:
    lost = patch.object(Path, "expanduser", side_effect=RuntimeError("Could not determine home directory."))
    with lost, pytest.warns(UserWarning, match=f"{WITHOUT}: Could not determine home.*; set HOME, or set"):
        assert library.load(WITHOUT) is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["ld: final link failed: No space left on device", "collect2: error: ld returned 1 exit status"],
            "ld: final link failed: No space left on device; make room in {folder}",
        ),
        (
            ["ld: error: no such file", "collect2: error: ld returned 1 exit status"],
            "ld: error: no such file; install",
        ),
        (
            ["ld: cannot find -lx", "collect2: error: ld returned 1"],
            "collect2: error: ld returned 1; install",
        ),
        (["it is not for this machine"], "it is not for this machine; install"),
    ],
)
def test_why_it_was_not_compiled_is_told(library: CppLibrary, lines: list[str], words: str) -> None:
    failed = subprocess.CalledProcessError(1, ["g++"], stderr="\n".join(lines))
    told = re.escape(f"{WITHOUT}: {words.format(folder=cache_folder())}")
    with patch.object(subprocess, "run", side_effect=failed), pytest.warns(UserWarning, match=told):
        assert library.load(WITHOUT) is None


def test_what_a_killed_process_left_is_removed(library: CppLibrary) -> None:
    name = library.build(cache_folder()).stem.rpartition("-")[0]
    next(cache_folder().glob("*.so")).unlink()
    left, of_another = cache_folder() / f"{name}-x1.tmp", cache_folder() / "other-x1.tmp"
    for each in (left, of_another):
        each.mkdir()
        (each / "made.so").write_text("half of it")
    library.build(cache_folder())
    assert not left.exists() and of_another.exists()


def test_a_compiler_that_does_not_end_is_told(library: CppLibrary) -> None:
    late = subprocess.TimeoutExpired("g++", 600, stderr=b"error")
    with (
        patch.object(subprocess, "run", side_effect=late),
        pytest.warns(UserWarning, match=f"{WITHOUT}: .*timed out after 600 seconds; install.*{SWITCH}=1"),
    ):
        assert library.load(WITHOUT) is None


@pytest.mark.parametrize(("value", "without"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_switch_asks_for_no_library(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch, value: str, without: bool
) -> None:
    monkeypatch.setenv(SWITCH, value)
    with warnings.catch_warnings(action="error"):
        assert (library.load(WITHOUT) is None) == without


def test_one_of_several_processes_compiles(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    find_output = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    compiler.write_text(f"#!/bin/sh\nsleep 0.2\necho call >> {calls}\n{find_output}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "kernels"
    threads = [threading.Thread(target=library.build, args=(folder,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.build(folder).read_text() == "made\n" and calls.read_text() == "call\n"
    for info, count in (("another processor", 2), ("a third one", 3)):
        monkeypatch.setattr(cpp_library, "cpu_info", lambda _, info=info: info)
        assert library.build(folder).exists() and calls.read_text() == "call\n" * count
