"""The page of models, and that every family of its table has the tests that the page names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hf_models import CASES, causal_lm
from meshwright.spec.hf.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

import models_page  # noqa: E402


def test_the_page_has_the_table_of_families() -> None:
    text = (ROOT / models_page.PAGE).read_text(encoding="utf-8")
    assert models_page.page(text) == text, "run python tools/models_page.py"
    assert all(f"| `{name}` |" in text for name in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_model_that_is_compared_with_transformers(family: str) -> None:
    named = [name for name, (theirs, _) in CASES.items() if causal_lm(theirs) == FAMILIES[family].causal_lm]
    assert named and all(family.removesuffix("_text") in name for name in named)
