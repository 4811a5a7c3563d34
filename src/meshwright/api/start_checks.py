"""Checks before a run starts, without any rank: its data, folder, memory, packages, weights and teacher."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from meshwright.api.initial_weights import check_resumed_weights, check_weights
from meshwright.spec import RunSpec, UserError


def check_start(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Raise the `UserError` of a `train` for which this host has too little memory, or `out` is not right."""
    check_host(spec, out)
    check_here(spec, out, resume)


def check_host(spec: RunSpec, out: Path) -> None:
    """Raise the `UserError` of a run that this host can't start: by its folder, data, teacher or memory."""
    from meshwright.rank.auto_layout import check_room

    check_writable_folder(out)
    check_inputs(spec)
    check_other_models(spec)
    check_room(spec)


def check_inputs(spec: RunSpec) -> None:
    """Raise the `UserError` of corpora and a tokenizer that are not there, or cannot be read.

    Of files of this host the first document is read; a hub, and what a URL names, are not asked.
    """
    from meshwright.data.chat_source import ChatSource, with_chats
    from meshwright.data.hub_source import HUB
    from meshwright.data.manifest import shards_of
    from meshwright.data.readers import SYNTHETIC, FileSource
    from meshwright.data.sources import open_source
    from meshwright.data.tokenize import bpe_size, build_tokenizer, check_tokenizer
    from meshwright.storage.remote import is_url

    data, vocab_size = spec.data, spec.model.vocab_size
    texts = [name for name in data.mixture or [data.corpus] if name != SYNTHETIC and not shards_of(name)]
    chats: list[ChatSource] = []
    for name in texts:
        if name == "stdlib" or name.startswith(HUB) or is_url(name):
            continue
        source = with_chats(open_source(name, data.text_key), data)
        if isinstance(source, FileSource):
            source.check_first()
        if isinstance(source, ChatSource):
            chats.append(source)
    if not texts:  # token ids need no tokenizer
        return
    check_tokenizer(data.tokenizer, vocab_size)
    if bpe_size(data.tokenizer, vocab_size) is not None:
        for source in chats:
            source.check_text()
    if bpe_size(data.tokenizer, vocab_size) is None and not is_url(data.tokenizer):
        tokenizer = build_tokenizer(data.tokenizer, vocab_size, [], 0.0, None, True)
        for source in chats:
            source.check_first(tokenizer)


def nearest_folder(out: Path) -> Path:
    """Return the folder of `--out`, or the first above it that is there. Raises `UserError` for a file."""
    there = next(each for each in (out.absolute(), *out.absolute().parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"--out: {there} is a file, not a folder; give another --out")
    return there


def check_writable_folder(out: Path | None) -> None:
    """Raise `UserError` if the folder of `--out` cannot be made, or nothing can be written into it."""
    if out is None:
        return
    there = nearest_folder(out)
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out: {out} cannot be written, as {there} may not be; give another --out")


def check_here(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Refuse a start by what is installed, and by what `out` and the folder of the weights hold."""
    check_packages(spec)
    check_folder(spec, out, resume)
    if resume is None:
        check_second_tier(spec, out)
        check_weights(spec)
    else:
        check_resumed_weights(spec, out)


def check_packages(spec: RunSpec) -> None:
    """Raise `UserError` if a package of `train.trackers` is not installed, before there is a folder."""
    if spec.train.trackers:
        from meshwright.report.trackers import check_trackers

        check_trackers(spec.train.trackers)


def check_folder(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Refuse a start that would replace or ignore what the folder `out` holds, or learn from itself."""
    _check_tiers_are_apart(spec, out)
    if resume is None:
        if (out / "run.json").exists():
            raise UserError(
                f"--out: {out} already holds a run; continue it with --resume auto, or give another --out"
            )
        return
    from meshwright.checkpoint.directory import candidates, latest_step, published
    from meshwright.checkpoint.disk import LATEST
    from meshwright.runs.record import last_checkpoint

    teacher = None if spec.distil is None else spec.distil.teacher
    if teacher is not None and Path(teacher).resolve() == out.resolve():
        raise UserError(
            f"distil.teacher: {out} is the run's own folder, whose weights change; copy the folder, and "
            f"resume the copy"
        )
    checkpoints = spec.checkpoint.folder(out)
    if resume != "auto":
        if not resume.isdecimal():
            raise UserError(f"--resume: {resume!r} is neither 'auto' nor a step")
        candidates(checkpoints, int(resume))
        return
    before = last_checkpoint(out)
    was_some = before is not None or os.path.lexists(checkpoints / LATEST)
    if not published(checkpoints) and was_some and _is_fetched(spec):
        return
    if latest_step(checkpoints) is None and before is not None:
        raise UserError(
            f"--resume: {checkpoints} holds no checkpoint, but {out} has saved one at step {before}; give "
            f"the checkpoint.dir that it had, put them back, or give another --out"
        )


def _check_tiers_are_apart(spec: RunSpec, out: Path) -> None:
    """Refuse a `checkpoint.remote` that is the folder of the run or of its checkpoints, or part of one."""
    parts = urlsplit(spec.checkpoint.remote or "")
    if parts.scheme not in ("file", "local"):
        return
    remote = Path(unquote(parts.netloc + parts.path)).resolve()
    for folder in (spec.checkpoint.folder(out).resolve(), out.resolve()):
        if remote.is_relative_to(folder) or folder.is_relative_to(remote):
            raise UserError(
                f"checkpoint.remote: {spec.checkpoint.remote} is not apart from {folder}, which the run "
                f"writes itself; give a folder outside of it, on another disk"
            )


def check_second_tier(spec: RunSpec, out: Path) -> None:
    """Refuse a start from no checkpoint whose `checkpoint.remote` has some, or cannot be read and written."""
    if spec.checkpoint.remote is None:
        return
    from meshwright.checkpoint.remote_checkpoints import remote_checkpoints, writer_of

    remote = remote_checkpoints(spec.checkpoint.remote, tries=2)
    if remote.history():
        raise UserError(
            f"checkpoint.remote: {remote} already holds checkpoints; go on with --resume auto, or give "
            f"another URL"
        )
    remote.claim(writer_of(spec.checkpoint.folder(out)))


def _is_fetched(spec: RunSpec) -> bool:
    """True if `checkpoint.remote` has a checkpoint to go on from."""
    from meshwright.checkpoint.remote_checkpoints import answering, remote_checkpoints

    url = spec.checkpoint.remote
    with answering():
        return url is not None and bool(remote_checkpoints(url).history())


def check_other_models(spec: RunSpec) -> None:
    """Raise `UserError` for a run that distils from a teacher, or from answers, that it cannot learn from."""
    from meshwright.spec.files import user_path
    from meshwright.spec.other_models import teacher_of

    teacher_of(spec)
    if spec.distil is not None and spec.distil.logits is not None:
        from meshwright.distil.stored_answers import check_answers

        check_answers(user_path(spec.distil.logits, "distil.logits"), spec)
