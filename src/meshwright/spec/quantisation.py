"""The number formats that a trained model can be quantised to, and how."""

from __future__ import annotations

from typing import get_args

from meshwright.spec.precision import Quantised

RECIPES: tuple[Quantised, ...] = get_args(Quantised)
ALGORITHMS = ("rtn", "gptq")
"""Round to nearest, and GPTQ (Frantar et al. 2022)."""
GROUPS = (128, 64, 32)
"""Columns that may share a scale in int4: by default the first that divides all widths."""
CALIBRATION_TOKENS = 65_536
"""Tokens that GPTQ takes unless told."""
