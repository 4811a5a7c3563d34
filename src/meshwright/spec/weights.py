"""Where a run's initial weights come from: `model.weights` as a folder, and whether the model fits it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.spec.architecture import RANDOM
from meshwright.spec.differences import as_in_file, differences
from meshwright.spec.errors import UserError
from meshwright.spec.files import user_path
from meshwright.spec.hf.config_read import has_weights
from meshwright.spec.model import ModelSpec
from meshwright.spec.records import sentence

TRAINING = {"mup_base_hidden", "moe.aux_loss", "moe.z_loss", "moe.bias_rate", "moe.capacity_factor"}
"""Keys of a model that say how it is trained: one that no run of ours has trained may get other values."""
UNUSED = {"preset", "hf", "weights", "family", "init_std", *TRAINING}
"""Keys of a model that its weights do not depend on."""
FIRST_STEP = Path("checkpoints", "step-00000000")
"""The checkpoint of step 0 in a run's folder: weights that were imported, merged or averaged."""


FOREIGN = (
    ".metadata", "step-*/.metadata", "latest_checkpointed_iteration.txt", "*_model_states.pt",
    "latest_universal", "zero", "lit_model.pth", "adapter_config.json",
)  # fmt: skip
"""Names in checkpoints of other programs, by which such a folder is told from others before it is opened."""
_FOREIGN_FILES = (".bin", ".pt", ".pth")


class WeightSource(NamedTuple):
    """The folder of an HF model, or of a run with the step of its checkpoint, None for the newest.

    With `is_foreign` it is the folder or the file of another program's checkpoint.
    """

    folder: Path
    is_hf: bool
    step: int | None = None
    is_foreign: bool = False

    @property
    def is_run(self) -> bool:
        """True for the folder of a run."""
        return not (self.is_hf or self.is_foreign)


def is_foreign(path: Path) -> bool:
    """Return True for what looks like the checkpoint of another program: a folder by its names, or a file."""
    if path.is_file():
        return path.suffix in _FOREIGN_FILES
    if (path / "run.json").is_file() or next(path.glob("*.safetensors"), None) is not None:
        return (path / "adapter_config.json").is_file() and not (path / "config.json").is_file()
    newest = path / "latest"  # of DeepSpeed: a file that names a folder
    named = newest.read_text(encoding="utf-8", errors="replace").strip() if newest.is_file() else ""
    states = named and Path(named).name == named and next((path / named).glob("*_model_states.pt"), None)
    return bool(states) or any(next(path.glob(pattern), None) is not None for pattern in FOREIGN)


def weight_source(weights: str, key: str = "model.weights") -> WeightSource | None:
    """Return where the weights that `model.weights` names are; None for random ones.

    Raises `UserError`, which starts with `key`.
    """
    if weights == RANDOM:
        return None
    path = folder = user_path(weights, key)
    step = None
    if (match := re.fullmatch(r"step-(\d+)(\.\d+)?", path.name)) and (path / "manifest.json").is_file():
        folder, step = path.absolute().parent.parent, int(match[1])
    if (folder / "run.json").is_file():
        return WeightSource(folder, False, step)
    if step is None and is_foreign(path):
        return WeightSource(path, False, is_foreign=True)
    if (folder / "config.json").is_file() and step is None:
        return WeightSource(folder, True)
    if path.is_file():
        problem = "is a file; give its folder"
    elif path.exists():
        problem = (
            "is neither a run's folder (run.json), nor a checkpoint in one, nor an HF folder (config.json); "
            "give the folder of a model"
        )
    else:
        problem = f"is not there; give the folder of a model, or {RANDOM}"
    raise UserError(f"{key}: {path} {problem}")


def run_of(weights: Any) -> Path | None:
    """Return the folder of the run whose weights `model.weights` names; None where it names no run."""
    folder = weights_folder(weights)
    return folder if folder is not None and (folder / "run.json").is_file() else None


def given_weights(model: Mapping[str, Any]) -> Any:
    """Return what the value of `model.weights` will be for a table of keys as a user gives it."""
    hf = model.get("hf")
    default = hf if isinstance(hf, (str, Path)) and hf and has_weights(hf) else RANDOM
    return model.get("weights", default)


def weights_folder(weights: Any) -> Path | None:
    """Return the folder of the model or run whose weights `model.weights` names; None for random ones."""
    if not isinstance(weights, str) or weights == RANDOM:
        return None
    path = user_path(weights, "model.weights")
    if path.is_file():  # a file of another program's weights
        return path.parent
    return path.parent.parent if (path / "manifest.json").is_file() else path


def own_tokenizer(weights: Any) -> Path | None:
    """Return the tokenizer.json that came with the weights that `model.weights` names, if there is one."""
    folder = weights_folder(weights)
    file = None if folder is None else folder / "tokenizer.json"
    return file if file is not None and file.is_file() else None


def check_fits(model: ModelSpec, theirs: ModelSpec, source: WeightSource) -> None:
    """Raise `UserError` for a key of `model` that contradicts the model whose weights `source` holds."""
    where = source.folder
    if source.is_foreign:
        remedy = f"give --from {where}"
    else:
        remedy = (
            f"give model.hf = {where}" if source.is_hf else f"begin with that run: meshwright train {where}"
        )
    one, other = (each.model_dump(mode="json") for each in (model, theirs))
    for key, (own, its) in differences(one, other).items():
        if key == "vocab_size":
            _check_rows(own, its, where)
        elif key == "mtp_num_layers" and own == 0:
            continue  # the layer is left out
        elif key not in UNUSED:
            raise UserError(
                f"model.{key}: {as_in_file(own)} contradicts {where}, whose weights are of a model with "
                f"{as_in_file(its)}; remove it and {remedy}, or give model.weights = {RANDOM} for a new model"
            )


def _check_rows(rows: int, theirs: int, where: Path) -> None:
    """Raise `UserError` for a vocabulary without the rows of tokens that the weights in `where` know.

    New rows may be added, and those that pad the embedding beyond the tokenizer's tokens left out.
    """
    if rows >= theirs:
        return
    known, file = theirs, where / "tokenizer.json"
    if file.is_file():
        from meshwright.spec.hf.text_tokens import tokens_of

        known = tokens_of(file, "model.weights")
    if rows < known:
        raise UserError(
            f"model.vocab_size: {rows} leaves out tokens of the {known} that the weights in {where} are of; "
            f"remove it, or give {known} or more"
        )


def hf_model(folder: Path, key: str) -> ModelSpec:
    """Return the model of an HF folder's config.json. Raises `UserError`, which starts with `key`."""
    try:
        return ModelSpec.model_validate({"hf": str(folder)})
    except ValidationError as error:
        raise UserError(f"{key}: {folder}: {sentence(error, ModelSpec)}") from None
