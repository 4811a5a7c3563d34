"""Files that are replaced in one step."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` by a file of this content: write a temporary file in its folder, sync it, rename it.

    A reader, or a crash at any moment, finds the old content or the new one, never a part. Text is written in
    UTF-8. Raises `OSError`, and leaves the old file.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
