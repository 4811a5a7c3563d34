"""Memory of an import: about one tensor of the files, whatever the model has in all."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_folders import write_folder
from import_memory import measured

SIZES = {"layers": 3, "hidden": 1024, "ffn": 4608, "heads": 8, "kv_heads": 8, "vocab_size": 4608}


def test_an_import_holds_about_one_tensor(tmp_path: Path) -> None:
    about = write_folder(tmp_path / "hf", SIZES, torch.float32)
    assert about["bytes"] > 200e6 and about["largest_tensor"] < 20e6
    found = measured(tmp_path / "hf", tmp_path / "run")
    assert found["above"] < 3 * about["largest_tensor"]
