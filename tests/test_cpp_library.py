from __future__ import annotations

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
        ("g++ 'x", "No closing quotation; install g\\+\\+"),
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


def test_a_compiler_that_does_not_end_is_told(library: CppLibrary) -> None:
    late = subprocess.TimeoutExpired("g++", 600, stderr=b"error")
    with (
        patch.object(subprocess, "run", side_effect=late),
        pytest.warns(UserWarning, match=f"{WITHOUT}: .*timed out after 600 seconds; install.*{SWITCH}=1"),
    ):
        assert library.load(WITHOUT) is None


def test_the_switch_asks_for_no_library(library: CppLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    with warnings.catch_warnings(action="error"):
        assert library.load(WITHOUT) is None


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
