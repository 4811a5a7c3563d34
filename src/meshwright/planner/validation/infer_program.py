"""Software stack, cluster and precision recipe of a published run, from its row.

The column `program` names the program, and `attention` and `gradient_bytes` what it was told to do. Where the
program is not stated, the row's source and comment may name it, never its model; else it is inferred from the
year of publication.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import catalogue, cluster
from meshwright.hardware.network import with_network
from meshwright.planner.cost.precision import precision
from meshwright.planner.cost.software import STACKS, Attention, SoftwareStack
from meshwright.planner.validation.table import PredictionError, Row, first_match, phrase, short

_PROGRAMS = (
    (r"megatron[ -]?fsdp", "megatron-fsdp"),
    (r"nemo|megatron[ -]?bridge|dgxc|mlperf", "nemo"),
    (r"megatron[ -]?core|mcore", "megatron-core"),
    (r"megatron[ -]?deepspeed|bigscience|tr11|mt-nlg|turing-nlg", "megatron-deepspeed"),
    (r"megatron([ -]?lm)?", "megatron-lm"),
    (r"hai[ -]?llm", "hai-llm"),
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
_CAPTURED = 26, 6
"""Release of NVIDIA's containers from which steps with experts are captured as CUDA graphs on Blackwell."""
_NIC = (
    r"([1-9]) ?[x\u00d7] ?([1-9]\d{0,3}) ?"
    r"(?-i:[Gg]bps|Gb/s|[Gg][Bb]its?/s|Gb?(?:it)?[ -]?(?:IB|InfiniBand|[EHNX]DR|RoCE|Omni-?Path|Ethernet))"
)
"""NICs per node and Gbit/s of each in a comment: a unit of bits per second, or the network's name."""
_JEAN_ZAY = r"tr11|bigscience|jean[ -]zay", (4, 100.0)
"""Words for a cluster that the catalogue lacks, and its NICs per node and Gbit/s of each.

Source: Jean Zay's nodes of 8 A100 have 4 Omni-Path links of 100 Gbit/s (BigScience 2022, BLOOM's model card).
"""
_EAGER = (
    r"(?:torchtitan,?|fsdp\d?,?|in|runs?) \(?eager|eager (?:mode|execution)",
    r"compiled?|torch\.compile",
)
"""Words for a program of modules that are not compiled, and words beside which they tell nothing."""
_MOST_OF_A_NIC = 1600.0
"""Largest `network_gbps` that is taken for one device's; more is a node's."""
_DEVICES = (
    (r"a100.*40", "a100-40-sxm"),
    (r"a100.*pcie", "a100-80-pcie"),
    (r"a100(?!\d)", "a100-80-sxm"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100.*(96|hbm2e)", "h100-96"),
    (r"h100(?!\d)", "h100-sxm"),
    (r"gh200", "gh200"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"b300", "b300"),
    (r"tpu.?v?4", "tpu-v4"),
    (r"tpu.?v?5p", "tpu-v5p"),
    (r"tpu.?v?5(e|.?lite)", "tpu-v5e"),
    (r"tpu.?v?6|trillium", "tpu-v6e"),
    (r"tpu.?v?7|ironwood", "tpu-v7"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"\bl4\b", "l4"),
)
"""Pattern of a GPU's name -> its cluster in the catalogue; the first match counts."""
_RECIPES = (
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


def program_of(row: Row) -> SoftwareStack:
    """The software stack of the row's program, with what the row states of it. Raises `PredictionError`."""
    stated = row.words["program"].lower()
    name = stated if stated in STACKS else _program(lambda words: phrase(words, stated))
    if stated and name is None:
        known = (
            "Megatron-LM, Megatron-Core, NeMo, DeepSpeed, torchtitan, FSDP, llm-foundry, nanotron and MaxText"
        )
        raise PredictionError(f"the program '{short(row.words['program'])}' is not known; {known} are")
    if name is None:
        name = row.infer("program", _usual_program(row))
    if (release := _release(name, row)) != name:
        row.derive("stack", release)
    stack = STACKS[release]
    if attention := row.words["attention"]:
        stack = replace(stack, attention=cast(Attention, attention))
    if (width := row.whole("gradient_bytes")) is not None:
        stack = replace(stack, gradient_bytes=width, recipe=replace(stack.recipe, gradient=width))
    return stack


def _program(says: Callable[[str], object]) -> str | None:
    """The first program whose words a text says, or None."""
    return next((name for words, name in _PROGRAMS if says(words)), None)


def _usual_program(row: Row) -> str:
    """The program that the row's source names, or the usual one of its year and ZeRO stage."""
    if (name := _program(row.says)) is not None:
        return name
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
    if name == "nemo" and (version := row.says(r"\[(\d\d)\.(\d\d)[\d.]* nemo container")):
        captured = (int(version[1]), int(version[2])) >= _CAPTURED
        if captured and row.whole("experts") and re.search(r"b[23]00", row.words["gpu"].lower()):
            return "nemo-graphs"
    return name


def _written(row: Row) -> float:
    """Year and month of a row's publication, such as 2205; infinite if its source has no arXiv number."""
    written = phrase(r"arxiv:(\d{4})\.\d+", row.words["source"])
    return int(written[1]) if written else float("inf")


def cluster_of(row: Row, gpus: int) -> Cluster:
    """The catalogue's cluster of the row's GPU with the row's network. Raises `PredictionError`."""
    gpu = row.words["gpu"].lower().replace("_", "-")
    parts = re.split(r"[/+,&]| and ", gpu)
    named = {name for part in parts if (name := _device(part)) is not None}
    if len(named) > 1:
        raise PredictionError(f"the GPUs '{short(row.words['gpu'])}' are of several kinds")
    name = _device(gpu)
    if name is None:
        raise PredictionError(f"the GPU '{short(row.words['gpu'])}' is not in the catalogue")
    usual = cluster(name, gpus)
    if len(usual.levels) == 1:
        return usual
    if (each := row.numbers.get("network_gbps")) is not None:
        nics = usual.node if each <= _MOST_OF_A_NIC else 1
        return with_network(usual, nics=nics, nic_bandwidth=each * 1e9 / 8).resized(gpus)
    words, network = _JEAN_ZAY
    if stated := row.says(_NIC):
        network = int(stated[1]), float(stated[2])
    elif not row.says(words):
        return usual
    nics, each = network
    row.derive("network_gbps", f"{nics} x {each:g} a node")
    return with_network(usual, nics=nics, nic_bandwidth=each * 1e9 / 8).resized(gpus)


def _device(gpu: str) -> str | None:
    """The cluster in the catalogue of a GPU's name in small letters, or None."""
    catalogued = (name for name in catalogue() if name in gpu or gpu.split("-")[0] == name)
    return first_match(_DEVICES, gpu) or next(catalogued, None)


def format_of(row: Row, cluster: Cluster) -> str:
    """The precision recipe; if the row states none, fp16 on an A100 and bf16 on others."""
    plain, told = row.words["precision"].lower(), row.words["fp8_recipe"].lower()
    low = first_match((*_RECIPES, (_BY_TENSOR, "fp8")), told)
    if low is None and told not in ("", "none"):
        raise PredictionError(
            f"the fp8_recipe '{short(told)}' is not one of tensor, row, block, mxfp8, nvfp4"
        )
    stated = first_match(_RECIPES, plain)
    any_fp8 = stated == "fp8" and not re.search(_BY_TENSOR, plain)
    if low and stated not in (None, low) and not (any_fp8 and precision(low).products == "fp8"):
        raise PredictionError(f"its precision '{short(plain)}' has no fp8_recipe '{short(told)}'")
    if (recipe := low or stated) is not None:
        format = precision(recipe).products
        if format in ("fp8", "fp4") and format not in cluster.device.peak:
            raise PredictionError(f"its {cluster.device.name} does not compute in {recipe}")
        return recipe
    return row.infer("precision", "fp16" if cluster.device.name.startswith("A100") else "bf16")
