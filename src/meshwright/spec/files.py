"""Paths and texts of JSON and TOML that users name: whatever they hold, they give a value or a sentence."""

from __future__ import annotations

import codecs
import json
import math
import tomllib
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError

MAX_JSON = 64 << 20
"""Largest size in bytes of a JSON file that is read whole; its values may take 30 times as much memory."""
MAX_TOML = 1 << 20
"""Largest size in bytes of a TOML file."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
"""First line of what stands in a file's place until Git LFS fetches it."""
_TOML_PARTS = 10**7
"""Most parts of the keys of a TOML file, squared and added up: `tomllib` keeps every prefix of a key."""


def user_path(name: str | Path, key: str) -> Path:
    """Return the path that a user gave for `key`, with a `~` in it replaced by the home folder.

    It may lead nowhere. Raises `UserError` where there is no such home folder, and for a name that the system
    refuses, such as one that is too long.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
        return path
    except RuntimeError:
        reason = "it begins in a home folder that is not known; give the path without '~', or set HOME"
    except OSError as error:
        reason = f"{error.strerror}; give another path"
    raise UserError(f"{key}: {shortened(str(name))} cannot be used: {reason}") from None


def shortened(text: str) -> str:
    """Return at most 200 characters of a text, with its middle left out."""
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def is_lfs_pointer(path: Path) -> bool:
    """Return True for a file that Git LFS has not fetched: in its place is a text that names it."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def read_text(path: Path, most: int) -> str:
    """Return the text of a file of at most `most` bytes of UTF-8, without the mark of its byte order.

    Raises OSError and ValueError.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16 or UTF-32; save it as UTF-8")
    return content.decode("utf-8-sig")


def strict_json(value: Any) -> Any:
    """Return `value` with every non-finite float replaced by None, so that any JSON reader accepts it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): strict_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(part) for part in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python's limit on the digits of a number
        raise ValueError("it has a number of too many digits") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, also where nesting or keys are too deep."""
    if sum(line.count(".") ** 2 for line in text.splitlines()) > _TOML_PARTS:
        raise ValueError("it has keys of too many parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("it has a number of too many digits") from None
