"""Rules of checkpoints: what goes back to one, and where a second tier of them may be."""

from __future__ import annotations

from urllib.parse import urlsplit

from meshwright.spec.errors import UserError
from meshwright.spec.sections import Sections


def rollbacks_have_checkpoints(spec: Sections) -> None:
    """A run goes back from a loss spike to a checkpoint that it saved on its way."""
    if spec.recovery.on_spike == "rollback" and not spec.checkpoint.every:
        raise UserError(
            "recovery.on_spike: 'rollback' needs checkpoints to go back to, and checkpoint.every is 0; try "
            "checkpoint.every = 100"
        )


def second_tier_is_a_store(spec: Sections) -> None:
    """`checkpoint.remote` is where fsspec writes, as its name is in records without a password."""
    url, every = spec.checkpoint.remote, spec.checkpoint.remote_every
    if url is None:
        if every != 1:
            raise UserError(
                f"checkpoint.remote_every: {every} counts the checkpoints that are copied to "
                f"checkpoint.remote, which is not given; give a URL, such as s3://bucket/run, or leave it out"
            )
        return
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise UserError(
            f"checkpoint.remote: {url!r} has no scheme, by which a URL says what it is of; give one such as "
            f"s3://bucket/run or file:///folder, or a folder as checkpoint.dir"
        )
    if parts.scheme in ("http", "https"):
        raise UserError(
            f"checkpoint.remote: {url} cannot be written to; give one such as s3://bucket/run, gs:// or az://"
        )
    if not (parts.netloc + parts.path).strip("/"):
        raise UserError(
            f"checkpoint.remote: {url!r} names no bucket or folder; give one, such as s3://bucket/run or "
            f"file:///folder"
        )
    if parts.scheme == "memory":
        raise UserError(
            f"checkpoint.remote: {url} is the memory of a process, and gone with it; give a store that "
            f"stays, such as s3://bucket/run or file:///folder"
        )
    if parts.password is not None:
        raise UserError(
            f"checkpoint.remote: the URL of {parts.hostname} has a password, which every checkpoint would "
            f"hold; give it to the library of {parts.scheme}:// by its variables or files"
        )
    if spec.outer.quorum is not None:
        raise UserError(
            f"checkpoint.remote: {url}: islands that come when they can (outer.quorum) have checkpoints "
            f"each, which are not copied; remove one of the two"
        )


CHECKPOINT_RULES = (rollbacks_have_checkpoints, second_tier_is_a_store)
