"""Tokenizers on disk for the tests of folders that others publish."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of each way to put tokens around a text."""
    from tokenizer_variants import save_variants  # skips the test where transformers is not installed

    return save_variants(tmp_path_factory.mktemp("saved"))
