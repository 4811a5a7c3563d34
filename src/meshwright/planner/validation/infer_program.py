"""Software stack, cluster and number format of a published run, from its row."""

from __future__ import annotations

import re

from meshwright.hardware.cluster import Cluster, with_network
from meshwright.hardware.find import catalogue, cluster
from meshwright.planner.cost.software import STACKS, SoftwareStack
from meshwright.planner.validation.table import FORMATS, PredictionError, Row, first_match, short

_PROGRAMS = (
    (r"deepseek|hai-llm", "hai-llm"),
    (r"torchtitan.*eager", "fsdp"),
    (r"torchtitan", "fsdp-compiled"),
    (r"llm-foundry|mosaic|composer|\bmpt\b", "llm-foundry"),
    (r"olmo|\bfsdp\b", "fsdp"),
    (r"nanotron|playbook", "nanotron"),
    (r"bloom|bigscience|\btr11|mt-nlg|turing", "megatron-deepspeed"),
    (r"megatron-core|mcore|nemo|dgxc|\bcore_r", "megatron-core"),
)
"""Pattern of a row's text -> its software stack; the first match counts."""
_FUSED = 2207
"""Year and month from which training programs have FlashAttention (Dao et al. 2022, arXiv 2205.14135)."""
_NETWORKS = ((r"bloom|bigscience|\btr11", (4, 100.0)),)
"""Pattern of a row's text -> NICs per node and Gbit/s of each, where they differ from the catalogue.

Source: Jean Zay's nodes of 8 A100 have 4 Omni-Path links of 100 Gbit/s (BigScience 2022, BLOOM's model card).
"""
_DEVICES = (
    (r"a100.*40", "a100-40-sxm"),
    (r"a100.*pcie", "a100-80-pcie"),
    (r"a100", "a100-80-sxm"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100.*(96|hbm2e)", "h100-96"),
    (r"h100", "h100-sxm"),
    (r"gh200", "gh200"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"tpu.?v?4", "tpu-v4"),
    (r"tpu.?v?5p", "tpu-v5p"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"\bl4\b", "l4"),
)
"""Pattern of a GPU's name -> its cluster in the catalogue; the first match counts."""


def program_of(row: Row) -> SoftwareStack:
    """The software stack that the row names, or the one of its year and ZeRO stage."""
    text, zero = row.text, row.whole("zero")
    if zero == 3 and re.search(r"megatron|deepspeed|zero-3", text) and not re.search(r"fsdp|core", text):
        return STACKS["deepspeed-zero3"]
    if (name := first_match(_PROGRAMS, text)) is not None:
        return STACKS[name]
    written = re.search(r"arxiv:(\d{4})\.", text)
    if zero == 3:
        return STACKS["fsdp"]
    if re.search(r"zero bubble|vtrain|korthikanti|sc21", text) or (written and int(written[1]) < _FUSED):
        return STACKS["megatron-2021"]
    return STACKS["megatron-core"]


def cluster_of(row: Row, gpus: int) -> Cluster:
    """The catalogue's cluster of the row's GPU with the row's network. Raises `PredictionError`."""
    gpu = row.words["gpu"].lower().replace("_", "-")
    catalogued = (name for name in catalogue() if name in gpu or gpu.split("-")[0] == name)
    name = first_match(_DEVICES, gpu) or next(catalogued, None)
    if name is None:
        raise PredictionError(f"the GPU '{short(row.words['gpu'])}' is not in the catalogue")
    usual = cluster(name, gpus)
    stated = re.search(r"(\d+) ?x ?(\d+) ?gb", row.text)
    network = first_match(_NETWORKS, row.text) or (stated and (int(stated[1]), float(stated[2])))
    if not network or len(usual.levels) == 1:
        return usual
    nics, gigabits = network
    return with_network(usual, nics=nics, nic_bandwidth=gigabits * 1e9 / 8).resized(gpus)


def format_of(row: Row, cluster: Cluster) -> str:
    """The number format of matrix products; if the row states none, fp16 on an A100 and bf16 on others."""
    stated = next((name for name in FORMATS if name in row.words["precision"].lower()), None)
    usual = "fp16" if cluster.device.name.startswith("A100") else "bf16"
    return stated or row.infer("precision", usual)
