"""Shared libraries of the program's C++ sources, compiled on this machine on first use.

They need a C++ compiler. The result lies in `~/.cache/meshwright/kernels`, so that later processes, on this
host or on one like it, load it at once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright import atomic
from meshwright.host import cpu_info, is_switched_on

SWITCH = "MESHWRIGHT_CPP_DISABLE"
"""Set to 1 (anything but 0) to do without these libraries."""
_COMPILER = "install g++, name another compiler in CXX"
_FULL = os.strerror(errno.ENOSPC)
_OPTIONS = ("-std=c++20", "-O3", "-shared", "-fPIC")


def cache_folder() -> Path:
    """The folder of compiled libraries. Raises `RuntimeError` where the user has no home folder."""
    return Path("~/.cache/meshwright/kernels").expanduser()


class NoLibraryError(Exception):
    """A library could not be compiled or loaded: the reason, and what would help."""


@dataclass(frozen=True)
class CppLibrary:
    """The sources of a library, with `options` of the compiler, and files and options for the linker."""

    name: str
    sources: tuple[Path, ...]
    options: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    headers: tuple[Path, ...] = ()
    built_for: str = ""
    """Version of what is linked, whose files keep their names."""

    def load(self, without: str) -> ctypes.CDLL | None:
        """The compiled library; None where it cannot be had, or is not wanted.

        `without` tells in a warning what it means that it could not be compiled.
        """
        if is_switched_on(SWITCH):
            return None
        try:
            return self.loaded()
        except NoLibraryError as error:
            warnings.warn(f"{without}: {error}, or set {SWITCH}=1 to be told no more", stacklevel=3)
            return None

    def loaded(self, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        """The compiled library, loaded by `dlopen` with this mode. Raises `NoLibraryError`."""
        folder: Path | None = None
        try:
            folder = cache_folder()
            return ctypes.CDLL(str(self.build(folder)), mode)
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            reason = _reason(error)
            raise NoLibraryError(f"{reason}; {_remedy(error, reason, folder)}") from error

    def build(self, folder: Path, *options: str) -> Path:
        """Compile with further `options` into `folder`, unless that was done, and return the file.

        Its name ends with a hash of its content, as to load a damaged one would kill the process. Of several
        processes one compiles, and the others wait for it. Raises `OSError`, `ValueError` for a CXX that
        cannot be read, and `subprocess.SubprocessError`.
        """
        compiler = _compiler()
        command = [*compiler, *_OPTIONS, *self.options, *options]
        machine = sys.platform, platform.machine(), cpu_info("model name"), cpu_info("flags")
        known = command, self.linked, self.built_for, machine
        content = b"".join(path.read_bytes() for path in (*self.headers, *self.sources))
        name = f"{self.name}-{_digest(repr(known).encode() + content)}"
        if found := _whole(folder, name):
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if found := _whole(folder, name):
                return found
            for left in folder.glob(f"{name}-*.tmp"):  # by a process that was killed while it compiled
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(prefix=f"{name}-", suffix=".tmp", dir=folder) as temporary:
                made = Path(temporary) / "made.so"
                subprocess.run(
                    [*command, *map(str, self.sources), "-o", str(made), *self.linked],
                    check=True, capture_output=True, text=True, timeout=600,
                )  # fmt: skip
                if not made.exists():
                    raise OSError(f"{compiler[0]} has made no file")
                library = made.read_bytes()
            target = folder / f"{name}-{_digest(library)}.so"
            atomic.write(target, library)
        return target


def _whole(folder: Path, name: str) -> Path | None:
    """The library of this name in a folder, if it is there and undamaged."""
    for path in folder.glob(f"{name}-*.so"):
        if path.is_file() and path.stem == f"{name}-{_digest(path.read_bytes())}":
            return path
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compiler() -> list[str]:
    """The words of CXX, or `g++`. Raises `ValueError`."""
    given = os.environ.get("CXX", "")
    try:
        return shlex.split(given) or ["g++"]
    except ValueError as error:
        raise ValueError(f"CXX: {given!r} cannot be read ({error})") from error


def _reason(error: Exception) -> str:
    """One line on why a library was not compiled."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    output = error.stderr.strip() or f"{error.cmd[0]} has ended with exit code {error.returncode}"
    lines = [line for line in output.splitlines() if "error" in line or _FULL in line]
    # A linker's own line comes before the one in which the compiler says that it failed.
    return next((line for line in lines if not line.startswith("collect2")), [*lines, output][0])


def _remedy(error: Exception, reason: str, folder: Path | None) -> str:
    """Advice on an error, for a cache in `folder`; None stands for one that has no place."""
    if folder is None:
        return "set HOME"
    if _FULL in reason:
        return f"make room in {folder} and for temporary files"
    path = Path(getattr(error, "filename", None) or "")
    in_folder = path.is_relative_to(folder) or (path.parts and folder.is_relative_to(path))
    if in_folder and str(path) != _compiler()[0]:
        return f"make {folder} a folder that can be written"
    return _COMPILER
