"""Functions on tokens, checkpoints and trained models: tokenize, verify, export, import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from meshwright.api.options import (
    NewRun,
    Option,
    Step,
    Weights,
    choice,
    folder_name,
    license_id,
)
from meshwright.api.ranks import Result
from meshwright.spec import UserError, load
from meshwright.storage.upload import check_new

if TYPE_CHECKING:
    import torch

    from meshwright.data.tokenize import Counts
    from meshwright.model.decoder import Decoder

FORMATS = ("hf", "gguf", "dcp")
"""Formats of export."""
WEIGHTS = ("trained", "ema")
"""Sets of weights in a checkpoint: those of the last step, and their moving average."""
License = Annotated[str, Option(
    "license that the model card names: apache-2.0, mit or another id of the Hugging Face hub", "ID",
    license_id, "other")]  # fmt: skip


def tokenize(
    corpus: str,
    tokenizer: str,
    out: Path,
    *,
    vocab_size: int,
    text_key: str = "text",
    val_fraction: float = 0.0,
    special_tokens: str = "text",
    format: str = "auto",
    chat_template: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Counts:
    """Turn a corpus into a folder of token shards for `data.corpus`, and return the counts.

    `tokenizer` is 'bpe' (trained to `vocab_size`), 'bpe:N', 'byte' or the path of a tokenizer.json. Training
    it skips the share `val_fraction` of the documents, which a run with that fraction holds out. Special
    tokens that a text spells are read as characters, or with `special_tokens` 'read' as those tokens.
    `format` says what rows are, `columns` what they call the keys of it, and `chat_template` is the file that
    renders chats; by default their keys tell, and the template is that of the tokenizer's folder.
    """
    from meshwright.data.tokenize import tokenize as write

    return write(
        corpus, tokenizer, Path(out), vocab_size=vocab_size, text_key=text_key, val_fraction=val_fraction,
        special_tokens=special_tokens, format=format, chat_template=chat_template, columns=columns,
    )  # fmt: skip


def data_verify(folder: Path) -> Result:
    """Hash every file of a folder of tokens again, ignoring earlier verifications.

    Returns `files`, `bytes`, `documents`, `tokens` and `sha256` as the manifest has them (None where that
    cannot be read), `damaged` (0 or 1) and `problems`: a sentence about the first damaged file, or nothing.
    Raises `UserError` where `folder` holds no tokens.
    """
    from meshwright.data.manifest import MANIFEST, is_shards
    from meshwright.data.shards import TokenShards, read_manifest

    folder = Path(folder)
    if not is_shards(folder):
        raise UserError(f"{folder}: holds no {MANIFEST}; give a folder made by `meshwright tokenize`")
    remedy = "copy it again, or tokenize the corpus again"
    facts: Result = dict.fromkeys(("files", "bytes", "documents", "tokens", "sha256"))
    problems = []
    try:
        manifest = read_manifest(folder, remedy)
        facts = {
            "files": len(manifest.files),
            "bytes": sum(file.bytes for file in manifest.files.values()),
            "documents": manifest.documents,
            "tokens": manifest.tokens,
            "sha256": manifest.digest,
        }
        TokenShards(folder, remedy, check="content")
    except UserError as error:
        problems.append(str(error))
    return facts | {"damaged": len(problems), "problems": problems}


def export(
    run: Path,
    folder: Path | str,
    dtype: str | None = None,
    *,
    weights: Weights = "trained",
    step: Step = None,
    format: Annotated[str | None, Option(
        "hf: a folder with safetensors; dcp: one with a checkpoint of torch.distributed; gguf: a file; "
        "default by the name of TARGET", "|".join(FORMATS), choice(*FORMATS))] = None,
    license: License = "other",
    adapter: Annotated[bool, Option(
        "write the adapters of [lora] alone, as a folder of PEFT", default=False)] = False,
) -> None:  # fmt: skip
    """Write a run's checkpoint as an HF folder, in 'float32', 'bfloat16' or 'float16'.

    By default it is in the format that the weights are stored in, or that of the folder which an untrained
    run was imported from. A `folder` whose name ends in .gguf is a file for llama.cpp, which may be in
    'q8_0', too. `format` 'dcp' writes the tensors of the HF folder as a checkpoint of torch.distributed. The
    `folder` may be a URL that fsspec writes to, such as s3://bucket/folder. `weights` 'ema' writes the moving
    average of the weights (`train.ema`). `step` is which checkpoint, by default the newest. `license` is the
    one that the model card names, by its identifier on the Hugging Face hub. One parameter is in memory at a
    time, and with 'dcp' two.

    Adapters of a run with [lora] are merged into the weights; with `adapter` they are written alone, as a
    folder of PEFT.
    """
    run = existing(run, "the folder of a run")
    check_new(folder, "export")
    _check_weights(weights)
    try:
        license_id(license)
    except ValueError:
        raise UserError(
            f"license: {license!r} is not the identifier of a license; give one such as apache-2.0, mit or "
            "other"
        ) from None
    named = "gguf" if str(folder).lower().endswith(".gguf") else "hf"
    if format not in (None, *FORMATS):
        raise UserError(f"format: {format!r} is not one of {', '.join(FORMATS)}")
    if (format == "gguf") != (named == "gguf") and format is not None:
        raise UserError(
            f"--format: {format} does not fit {folder}; the names of GGUF files, and no others, end in .gguf"
        )
    from meshwright.weights.exports import export_adapter, export_folder, export_gguf_file

    if adapter:
        _check_adapter(folder, dtype, format, named)
        export_adapter(run, folder, weights == "ema", step)
    elif named == "gguf":
        export_gguf_file(run, folder, dtype, weights == "ema", step)
    else:
        export_folder(run, folder, dtype, weights == "ema", step, license, dcp=format == "dcp")


def _check_adapter(folder: Path | str, dtype: str | None, format: str | None, named: str) -> None:
    """Raise `UserError` for options that are about a whole model."""
    if named == "gguf":
        raise UserError(
            f"--adapter: writes a folder of PEFT, and {folder} is the name of a GGUF file; give a folder"
        )
    for name, value in (("dtype", dtype), ("format", format)):
        if value is not None:
            raise UserError(
                f"--{name}: {value} is about a whole model, and --adapter writes none; leave one of them out"
            )


def import_hf(
    folder: Path,
    out: NewRun,
    *,
    config: Annotated[Path | None, Option(
        "folder with the model's config.json, where the source has none", "FOLDER", folder_name)] = None,
    base: Annotated[Path | None, Option(
        "base model of an adapter; default the folder that it names", "FOLDER", folder_name)] = None,
) -> None:  # fmt: skip
    """Make a run's folder from a trained model; `train OUT --resume auto` continues from its step 0.

    `folder` is an HF folder, a checkpoint of torch.distributed, torchtitan, Megatron-Core, DeepSpeed or
    litgpt, or an adapter of PEFT, which is merged onto its `base`. `config` is a folder with the model's
    config.json. No code in any of these files is run. Raises `UserError`.
    """
    from meshwright.weights.load import import_run

    import_run(Path(folder), Path(out), *(None if each is None else Path(each) for each in (config, base)))


def checkpoint_list(directory: Path) -> list[Result]:
    """Return a row for each checkpoint of a run's folder, or of a folder of checkpoints.

    Rows have `step`, `bytes`, `tensors`, `ranks`, `saved_at`, `layout`, `latest` and `problem` (or None).
    """
    from meshwright.checkpoint.inspect import list_checkpoints

    return [asdict(info) for info in list_checkpoints(checkpoints_of(Path(directory)))]


def checkpoint_verify(directory: Path, step: Step = None) -> Result:
    """Check every hash of the checkpoint of `step` (default: the latest), and what else a load checks.

    `problems` lists the damage.
    """
    from meshwright.checkpoint.inspect import verify_checkpoint
    from meshwright.train.state import check_fields

    report = verify_checkpoint(checkpoints_of(Path(directory)), step, check_fields)
    return {**asdict(report), "path": str(report.path), "problems": list(report.problems)}


def checkpoints_of(folder: Path) -> Path:
    """Return the folder of a run's checkpoints; a folder without a run is one of checkpoints itself."""
    folder = existing(folder, "the folder of a run, or of its checkpoints")
    if (folder / "run.json").is_file():
        return load(folder).checkpoint.folder(folder)
    inner = folder / "checkpoints"  # the run's record is gone
    return inner if inner.is_dir() else folder


def existing(folder: Path | str, wanted: str) -> Path:
    """Return a folder as a path. Raises `UserError` with what is wanted if it is not there."""
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: does not exist, or is not a folder; give {wanted}")
    return Path(folder)


def is_run_folder(folder: Path) -> bool:
    """Return True for a run's folder, False for an HF folder. Raises `UserError` for others."""
    if (folder / "run.json").is_file():
        return True
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: is neither a run's folder (run.json) nor an HF folder (config.json)")
    return False


def as_run(model: Path, scratch: Path) -> Path:
    """Return a run's folder as it is, and for an HF folder the run that it makes in `scratch`."""
    if is_run_folder(model):
        return model
    import_hf(model, scratch)
    return scratch


def not_of_ranks(model: Path) -> UserError:
    """Return the error of an HF folder that is given to ranks of a torchrun."""
    return UserError(
        f"{model}: is an HF folder, of which ranks cannot read their parts; make a run of it with "
        f"`meshwright import {model} --out DIR`, and give that"
    )


def load_hf(folder: Path | str) -> Decoder:
    """Return the decoder of an HF folder, in eval mode: tokens (B, T) -> logits (B, T, V)."""
    from meshwright.exchange.hf import load_hf as load_folder

    return load_folder(Path(folder))


def load_run(
    run: Path,
    dtype: torch.dtype | None = None,
    *,
    weights: str = "trained",
    step: int | None = None,
) -> Decoder:
    """Return the decoder of a run's checkpoint, by default the newest, on one device, in eval mode.

    `weights` is 'trained', or 'ema' for their moving average (`train.ema`).
    """
    _check_weights(weights)
    from meshwright.weights.load import load_run as load_decoder

    return load_decoder(Path(run), dtype, average=weights == "ema", step=step)


def _check_weights(weights: str) -> None:
    if weights not in WEIGHTS:
        raise UserError(f"weights: {weights!r} is not one of {', '.join(WEIGHTS)}")
