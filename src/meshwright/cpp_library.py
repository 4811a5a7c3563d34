"""Shared libraries of the program's C++ sources, compiled on this machine on first use.

They need a C++ compiler. The result lies in `~/.cache/meshwright/kernels`, so that later processes, on this
host or on one like it, load it at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from meshwright import atomic
from meshwright.host import cpu_info

SWITCH = "MESHWRIGHT_CPP_DISABLE"
"""Set to 1 to do without these libraries."""
_OPTIONS = ("-std=c++20", "-O3", "-shared", "-fPIC")


def cache_folder() -> Path:
    """The folder of compiled libraries."""
    return Path("~/.cache/meshwright/kernels").expanduser()


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
        if os.environ.get(SWITCH) == "1":
            return None
        try:
            return ctypes.CDLL(str(self.build(cache_folder())))
        except (OSError, subprocess.SubprocessError) as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            reason = next((line for line in output.splitlines() if "error" in line), output.strip())
            warnings.warn(
                f"{without}: {reason}; install g++, name another compiler in CXX, or set {SWITCH}=1 to be "
                "told no more",
                stacklevel=3,
            )
            return None

    def build(self, folder: Path, *options: str) -> Path:
        """Compile with further `options` into `folder`, unless that was done, and return the file.

        Of several processes one compiles, and the others wait for it. Raises `OSError` and
        `subprocess.SubprocessError`.
        """
        command = [*shlex.split(os.environ.get("CXX", "g++")), *_OPTIONS, *self.options, *options]
        machine = sys.platform, platform.machine(), cpu_info("model name"), cpu_info("flags")
        known = command, self.linked, self.built_for, machine
        content = b"".join(path.read_bytes() for path in (*self.headers, *self.sources))
        digest = hashlib.sha256(repr(known).encode() + content).hexdigest()[:16]
        target = folder / f"{self.name}-{digest}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                with atomic.file(target) as made:
                    subprocess.run(
                        [*command, *map(str, self.sources), "-o", str(made), *self.linked],
                        check=True, capture_output=True, text=True, timeout=600,
                    )  # fmt: skip
        return target
