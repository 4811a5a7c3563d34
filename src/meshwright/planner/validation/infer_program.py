"""Software stack and precision recipe of a published run, from its row.

The column `program` names the program; `attention`, `gradient_bytes`, `cuda_graphs` and
`moe_pad_to_capacity` what it was told to do. Where the program is not stated, the row's source and comment
may name it, never its model; else it is inferred from the year of publication.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from meshwright.hardware.cluster import Cluster, Device
from meshwright.planner.cost.precision import precision
from meshwright.planner.cost.software import PROGRAM_NAMES, STACKS, Attention, SoftwareStack
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.validation.infer_remat import with_words
from meshwright.planner.validation.table import PredictionError, Row, first_match, phrase, short

_PROGRAMS = (
    (r"hai[ -]?llm|2412\.19437", "hai-llm"),
    (r"megatron[ -]?fsdp", "megatron-fsdp"),
    (r"nemo|megatron[ -]?bridge|dgxc|mlperf", "nemo"),
    (r"megatron[ -]?core|mcore", "megatron-core"),
    (r"megatron[ -]?deepspeed|bigscience|tr11|mt-nlg|turing-nlg", "megatron-deepspeed"),
    (r"megatron([ -]?lm)?", "megatron-lm"),
    (r"torchtitan", "fsdp-compiled"),
    (r"llm[ -]?foundry|mosaic(ml)?|composer", "llm-foundry"),
    (r"nanotron|ultra-?scale playbook", "nanotron"),
    (r"deepspeed|zero-3", "deepspeed-zero3"),
    (r"max[ -]?text", "maxtext"),
    (r"olmo\d?|fsdp\d?", "fsdp"),
)
"""Words of a program's name -> its software stack; the first match counts."""
_FUSED = 2207
"""Year and month from which training programs have FlashAttention (Dao et al. 2022, arXiv 2205.14135)."""
_COMPILED_LOSS = 202504
"""Year and month from which torchtitan compiles its loss, too (pull request 1033)."""
_DATE = re.compile(r"(?<!\d)(20[12]\d)[-_]?(0[1-9]|1[0-2])(?:[-_]?[0-3]\d)?(?!\d)").findall
"""Years and months in a text, as 202412, 2025-06 or 20250811."""
_EAGER = (
    r"(?:torchtitan,?|fsdp\d?,?|in|runs?) \(?eager|eager (?:mode|execution)",
    r"compiled?|torch\.compile",
)
"""Words for a program of modules that are not compiled, and words beside which they tell nothing."""
_RECIPES = (
    (r"mxfp4", "mxfp4"),
    (r"nvfp4|\bfp4", "nvfp4"),
    (r"mx", "mxfp8"),
    (r"row", "fp8-rowwise"),
    (r"block|\bsc\b|sub", "fp8-blockwise"),
    (r"fp8", "fp8"),
    (r"bf16", "bf16"),
    (r"fp16", "fp16"),
    (r"fp32", "fp32"),
)
"""Pattern of a precision -> its recipe (`planner/cost/precision.py`); the first match counts."""


_BY_TENSOR = r"tensor|delayed|current|\bcs\b|\bds\b|hybrid|e4m3"
"""Names of recipes of fp8 with one scale for a tensor."""


def program_of(row: Row, device: Device) -> SoftwareStack:
    """The software stack of the row's program on a device, with what the row states of it.

    Raises `PredictionError`.
    """
    stated = row.words["program"].lower()
    name = stated if stated in STACKS else _program(lambda words: phrase(words, stated))
    name = name or PROGRAM_NAMES.get(stated)
    if stated and name is None:
        known = (
            "Megatron-LM, Megatron-Core, NeMo, DeepSpeed, torchtitan, FSDP, llm-foundry, nanotron, MaxText "
            "and HAI-LLM"
        )
        raise PredictionError(f"the program '{short(row.words['program'])}' is not known; {known} are")
    if name is None:
        name = row.infer("program", _usual_program(row, device))
    if (release := _release(name, row)) != name:
        row.derive("stack", release)
    stack = _with_loss(STACKS[release], row, device)
    if stack.selective == "named":
        stack = with_words(stack, row)
    if attention := row.words["attention"]:
        stack = replace(stack, attention=cast(Attention, attention))
    if graphs := row.words["cuda_graphs"]:
        stack = _hosted(stack, graphs == "yes")
    if row.words["moe_pad_to_capacity"] == "yes":
        stack = replace(stack, pads_experts=True)
    if device.kind not in PROGRAMS[stack.name].devices:
        row.notes.append(
            f"{stack.name} does not run on {device.name}, by what is known of it; it is predicted all the "
            f"same"
        )
    if (width := row.whole("gradient_bytes")) is not None:
        stack = replace(stack, gradient_bytes=width, recipe=replace(stack.recipe, gradient=width))
    return stack


def _hosted(stack: SoftwareStack, graphs: bool) -> SoftwareStack:
    """The stack with steps captured as CUDA graphs, which no host launches, or with none."""
    if graphs:
        return replace(stack, hosting="graphs")
    return replace(stack, hosting="modules") if stack.name == "nemo-graphs" else stack


def _program(says: Callable[[str], object]) -> str | None:
    """The first program whose words a text says, or None."""
    return next((name for words, name in _PROGRAMS if says(words)), None)


def _usual_program(row: Row, device: Device) -> str:
    """The program that the row's source names, or the usual one of its device, its year and ZeRO stage."""
    if (name := _program(row.says)) is not None:
        return name
    if device.kind == "tpu":
        return "maxtext"
    if row.whole("zero") == 3:
        return "fsdp"
    return "megatron-lm" if _written(row) < _FUSED else "megatron-core"


def _release(name: str, row: Row) -> str:
    """The stack of a program at the time of a row."""
    if name == "megatron-lm" and _written(row) < _FUSED:
        return "megatron-2021"
    eager, compiled = (phrase(words, f"{row.words['program']}; {row.words['where']}") for words in _EAGER)
    if name == "fsdp-compiled" and eager and not compiled:
        return "fsdp"
    if name == "megatron-core" and _program(row.says) == "nemo":
        name = "nemo"
    return "nemo-graphs" if name == "nemo" and row.words["cuda_graphs"] == "yes" else name


def _with_loss(stack: SoftwareStack, row: Row, device: Device) -> SoftwareStack:
    """Torchtitan's stack with a compiled loss, if the row's date is after that of its first, or if it has no
    date and runs on devices of later generations than the H100, or of others than NVIDIA."""
    if stack.name != "fsdp-compiled":
        return stack
    dates = [
        int(year + month) for text in (row.words["source"], row.words["where"]) for year, month in _DATE(text)
    ]
    newer = device.kind != "cuda" or (device.capability or (0, 0)) > (9, 0)
    if not (max(dates) >= _COMPILED_LOSS if dates else newer):
        return stack
    later = STACKS["fsdp-compiled-loss"]
    row.derive("stack", later.name) if dates else row.infer("stack", later.name)
    return later


def _written(row: Row) -> float:
    """Year and month of a row's publication, such as 2205; infinite if its source has no arXiv number."""
    written = phrase(r"arxiv:(\d{4})\.\d+", row.words["source"])
    return int(written[1]) if written else float("inf")


def format_of(row: Row, cluster: Cluster) -> str:
    """The precision recipe; if the row states none, fp16 on a V100 or an A100 and bf16 on others."""
    plain, told = row.words["precision"].lower(), row.words["fp8_recipe"].lower()
    low = first_match((*_RECIPES, (_BY_TENSOR, "fp8")), told)
    if low is None and told not in ("", "none"):
        raise PredictionError(
            f"the fp8_recipe '{short(told)}' is not one of tensor, row, block, mxfp8, mxfp4, nvfp4"
        )
    stated = first_match(_RECIPES, plain)
    any_fp8 = stated == "fp8" and not re.search(_BY_TENSOR, plain)
    if low and stated not in (None, low) and not (any_fp8 and precision(low).products == "fp8"):
        raise PredictionError(f"its precision '{short(plain)}' has no fp8_recipe '{short(told)}'")
    if (recipe := low or stated) is not None:
        format = precision(recipe).products
        if format in ("bf16", "fp8", "fp4") and format not in cluster.device.peak:
            raise PredictionError(f"its {cluster.device.name} does not compute in {recipe}")
        return recipe
    return row.infer("precision", "fp16" if cluster.device.name.startswith(("A100", "V100")) else "bf16")
