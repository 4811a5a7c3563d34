"""Models of the Hugging Face hub: the folder of a repository's files in the hub's cache on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.spec import UserError
from meshwright.spec.hf.config_read import HUB_ID

_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")
FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
"""Files that are fetched: configs, weights, and what a tokenizer consists of."""


def is_hub_id(name: str) -> bool:
    """Return True for a text that has the form of a repository's id, org/name."""
    return HUB_ID.fullmatch(name) is not None


def hub_id(folder: object) -> str | None:
    """Return the name on the hub of the model in a folder of its cache, or None for any other folder."""
    found = [_CACHED.fullmatch(part) for part in Path(str(folder)).parts]
    return next((f"{match[1]}/{match[2]}" for match in found if match is not None), None)


def hub_folder(name: str, key: str) -> Path:
    """Return the folder of a model's files in the cache, to which the files that it lacks are downloaded.

    Nothing is asked of the network where HF_HUB_OFFLINE is set. Raises `UserError`, which starts with `key`,
    where the package is not installed, and for a model that cannot be fetched.
    """
    remedy = f"fetch it where there is a network, and give the folder: hf download {name} --local-dir DIR"
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{key}: {name} is not a folder here, and to fetch it from the hub takes a package: pip install "
            f"huggingface_hub; or {remedy}"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError):
            raise UserError(
                f"{key}: {name} is not a folder here, nor in the hub's cache, and HF_HUB_OFFLINE is set; "
                f"{remedy}"
            ) from error
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise UserError(
            f"{key}: {name} is not a folder here, and cannot be fetched from the hub "
            f"({type(error).__name__}: {reason.rstrip('.')}); {remedy}"
        ) from error
