"""Who opens a checkpoint of another program: the key that errors start with, and those that they advise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The key that a user gave a checkpoint for, in the words of the command line or of the run file.

    `config` and `base` are what names the folder with the model's config.json, and that of an adapter's base
    model.
    """

    key: str
    config: str
    base: str

    @property
    def needs_config(self) -> str:
        """The remedy of a checkpoint that does not describe its model."""
        return f"give {self.config} FOLDER, one with the model's config.json"


IMPORT = Caller("import", "--config", "--base")
MODEL_WEIGHTS = Caller("model.weights", "model.hf", "model.hf")
