"""Programs that call libraries in C++ compiled with g++'s sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent


@cache
def address_sanitizer() -> str | None:
    """The library of g++'s address sanitizer, which a program must load first; None without it."""
    if shutil.which("g++") is None:
        return None
    asked = ["g++", "-print-file-name=libasan.so"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    return str(found) if found.is_absolute() else None


def output(program: Path, *options: str) -> str:
    """Return what a program prints under the address sanitizer; it may import the tests' helpers.

    The library of C++ is loaded with it, which must find the exceptions that another library throws first.
    """
    asked = ["g++", "-print-file-name=libstdc++.so"]
    cpp = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": f"{address_sanitizer()} {cpp}",
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    call = [sys.executable, str(program), *options]
    ended = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
