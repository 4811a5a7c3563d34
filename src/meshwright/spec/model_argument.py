"""The word of a command line that stands for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.load import read_tree
from meshwright.spec.model_names import preset_named, why_unknown
from meshwright.spec.presets import PRESETS


def model_tables(word: str) -> tuple[dict[str, Any], str]:
    """Return the tables of the run that a MODEL stands for, and its run file, or an empty text.

    MODEL is a preset; a run file, or the folder of a run; an HF folder or its config.json; or a name by which
    people know a preset's model. Raises `UserError`, as `read_tree` does too.
    """
    path = Path(word)
    if word in PRESETS:
        return {"model": {"preset": word}}, ""
    if (path / "run.json").is_file():
        return read_tree(path), word
    if path.name == "config.json" or (path / "config.json").is_file():
        return {"model": {"hf": word}}, ""
    if path.suffix == ".toml" or path.is_file():
        return read_tree(path), word
    if not path.exists() and (preset := preset_named(word)) is not None:
        return {"model": {"preset": preset}}, ""
    reason = why_unknown(word, "is neither a preset, nor an HF folder or config.json, nor a run file")
    raise UserError(f"MODEL: '{word}' {reason}")
