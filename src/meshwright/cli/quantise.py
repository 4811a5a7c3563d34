"""The verb `quantise`: a trained model with few bits a weight, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.options import choice
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.rank.launchers import refuse_several_tasks
from meshwright.spec import UserError
from meshwright.spec.quantisation import ALGORITHMS, RECIPES
from meshwright.units import counted

WRITES = ("algorithm",)
"""Flags without effect on --compare."""
COMPARES = ("sensitivity", "eval_tokens")
"""Flags without effect unless with --compare."""


@verb(
    "quantise",
    Argument("RUN", "the folder of a run, or of an HF model"),
    Argument("FOLDER", "the HF folder to write; it must not exist, or be empty", required=False),
    Flag("recipe", "number format of linear layers; with --compare, of the sensitivity (int4)",
         "|".join(RECIPES), choice(*RECIPES)),
    Flag("algorithm", "round to nearest (the default), or GPTQ", "|".join(ALGORITHMS), choice(*ALGORITHMS)),
    api.quantise,
    Flag("compare", "write nothing: print bits per byte, size and speed of each recipe"),
    Flag("sensitivity", "with --compare, quantise one block (the default) or linear layer at a time",
         "block|linear|none", choice("block", "linear", "none")),
    api.compare_quantisation,
    JSON,
)  # fmt: skip
def quantise(call: Call) -> None:
    """Write a quantised HF folder, or print a table of recipes."""
    refuse_several_tasks()
    flags = dict(call.flags)
    compares = flags.pop("compare")
    if compares and len(call.words) > 1:
        raise UserError("--compare: writes no folder; remove it, or the folder")
    if not compares and len(call.words) == 1:
        raise UserError("FOLDER: is missing; give the folder to write, or --compare")
    if not compares and flags["recipe"] is None:
        raise UserError(f"--recipe: is missing; give one of {', '.join(RECIPES)}")
    others = WRITES if compares else COMPARES
    for name in others:
        if flags.pop(name) is not None:
            without = "with --compare, which shows both" if compares else "without --compare"
            raise UserError(f"--{name.replace('_', '-')}: has no effect {without}; remove it")
    flags = {name: value for name, value in flags.items() if value is not None}
    if flags["calibration_tokens"] < 1:
        raise UserError("--calibration-tokens: 0 is not valid; it should be a whole number of at least 1")
    if compares:
        show.result(call, api.compare_quantisation(Path(call.words[0]), **flags), _tables)
        return
    run, folder = map(Path, call.words)
    show.result(call, api.quantise(run, folder, **flags), _written)


def _written(found: Mapping[str, Any]) -> None:
    group = f" in groups of {found['group_size']}" if found["group_size"] else ""
    print(f"wrote {found['folder']}")
    layers = counted(found["layers"], "layers")
    print(f"{layers} in {found['recipe']}{group}, {found['bytes'] / 1e6:.2f} MB of weights")


def _tables(found: Mapping[str, Any]) -> None:
    show.table(
        [
            {
                "recipe": row["recipe"],
                "group": row["group"] or "",
                "bits per byte": f"{row['bits_per_byte']:.4f}",
                "change": f"{row['change_percent']:+.2f}%",
                "MB": f"{row['computed_bytes'] / 1e6:.2f}",
                "MB on disk": f"{row['file_bytes'] / 1e6:.2f}",
                "tokens/s": f"{row['tokens_per_second']:.0f}",
            }
            for row in found["table"]
        ]
    )
    for recipe, why in found["refused"].items():
        show.line(f"{recipe}: {why}")
    if found["sensitivity"]:
        print(f"\nonly one layer in {found['recipe']}, the rest in bf16:")
        show.table(
            [
                {"layer": row["layer"], "change": f"{row['change_percent']:+.3f}%"}
                for row in found["sensitivity"]
            ]
        )
