"""Exports of a run's checkpoint, of any layout, with one parameter in memory at a time."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from meshwright.exchange.gguf_file import GGUF_DTYPES, check_gguf, export_gguf
from meshwright.exchange.hf import export_hf
from meshwright.exchange.peft_adapter import write_adapter
from meshwright.runs.record import read_metrics, read_object
from meshwright.spec import UserError, load
from meshwright.spec.architecture import RANDOM
from meshwright.storage.upload import new_file
from meshwright.weights.load import DTYPE_KEY
from meshwright.weights.model_card import model_card
from meshwright.weights.saved_weights import SavedWeights, of_whole_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats of HF folders that may be asked for."""


def export_folder(
    run: Path,
    folder: Path | str,
    dtype: str | None,
    average: bool,
    step: int | None,
    license: str,
    dcp: bool = False,
) -> None:
    """Write the HF folder of a run's checkpoint, with a model card, to a path or a URL.

    With `dcp` its tensors are a checkpoint of torch.distributed. Raises `UserError`.
    """
    if dtype is not None and dtype not in DTYPES:
        hint = ", which is a format of GGUF files: name one that ends in .gguf" if dtype == "q8_0" else ""
        raise UserError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}{hint}")
    tokenizer = run / "tokenizer.json"
    if not tokenizer.is_file():
        warnings.warn(
            f"{run} has no tokenizer.json, so {folder} has none; copy one there for programs that read text",
            stacklevel=2,
        )

    def write(saved: SavedWeights) -> None:
        info = read_object(run / "run.json") or {}
        card = model_card(saved.spec, info, read_metrics(run), saved.step, license, Path(str(folder)).name)
        export_hf(
            folder,
            saved.spec.model,
            saved,
            tokenizer if tokenizer.is_file() else None,
            DTYPES[dtype] if dtype else stored_dtype(saved),
            side_files=run,
            card=card,
            dcp=dcp,
        )

    of_whole_checkpoint(run, step, average, write)


def export_adapter(run: Path, folder: Path | str, average: bool, step: int | None) -> None:
    """Write the adapters of a run's checkpoint as PEFT's folder, to a path or a URL. Raises `UserError`."""
    spec = load(run)
    if (lora := spec.lora) is None:
        raise UserError(
            f"--adapter: {run} has no adapters, as its run file has no [lora]; leave --adapter out for the "
            f"whole model"
        )
    base = spec.model.weights if spec.model.weights != RANDOM else None

    def write(saved: SavedWeights) -> None:
        dtype = torch.float64 if saved.exact else torch.float32
        write_adapter(folder, spec.model, lora, saved, base, dtype)

    of_whole_checkpoint(run, step, average, write)
    if lora.base_format is not None:
        warnings.warn(
            f"export: the adapters were trained beside weights in {lora.base_format}; on weights that are "
            f"not rounded so PEFT computes another model than the run; export without --adapter has the "
            f"run's own",
            stacklevel=2,
        )


def export_gguf_file(
    run: Path, target: Path | str, dtype: str | None, average: bool, step: int | None
) -> None:
    """Write the GGUF file of a run's checkpoint to a path or a URL. Raises `UserError`."""
    if dtype is not None and dtype not in GGUF_DTYPES:
        raise UserError(f"dtype: {dtype!r} is not one of {', '.join(GGUF_DTYPES)}")
    if not (run / "tokenizer.json").is_file():
        raise UserError(f"{run}: has no tokenizer.json, which is a part of GGUF files; export to a folder")
    with new_file(target, "export") as file:
        check_gguf(file, load(run).model)

        def write(saved: SavedWeights) -> None:
            own = str(stored_dtype(saved)).removeprefix("torch.")
            form = dtype or (own if own in GGUF_DTYPES else "float32")
            export_gguf(file, saved.spec.model, saved, run / "tokenizer.json", form)

        of_whole_checkpoint(run, step, average, write)


def stored_dtype(saved: SavedWeights) -> torch.dtype:
    """Return the format that loses nothing: that of the checkpoint, or of the folder it was imported from."""
    origin = (read_object(saved.run / "run.json") or {}).get(DTYPE_KEY)
    return DTYPES.get(str(origin), saved.dtype) if not saved.step else saved.dtype
