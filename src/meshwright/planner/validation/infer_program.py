"""Software stack, cluster and number format of a published run, from its row."""

from __future__ import annotations

import re

from meshwright.hardware.cluster import Cluster, with_network
from meshwright.hardware.find import catalogue, cluster
from meshwright.planner.cost.software import STACKS, SoftwareStack
from meshwright.planner.validation.table import FORMATS, Guesses, Row

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
_NETWORKS = {r"bloom|bigscience|\btr11": (4, 100.0)}
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
    for pattern, name in _PROGRAMS:
        if re.search(pattern, text):
            return STACKS[name]
    written = re.search(r"arxiv:(\d{4})\.", text)
    if zero == 3:
        return STACKS["fsdp"]
    if re.search(r"zero bubble|vtrain|korthikanti|sc21", text) or (written and int(written[1]) < _FUSED):
        return STACKS["megatron-2021"]
    return STACKS["megatron-core"]


def cluster_of(row: Row, gpus: int) -> Cluster | None:
    """The catalogue's cluster of the row's GPU with the row's network, or None for an unknown GPU."""
    named = row.words["gpu"].lower().replace("_", "-")
    name = next((name for pattern, name in _DEVICES if re.search(pattern, named)), None)
    if name is None:
        name = next((name for name in catalogue() if name in named or named.split("-")[0] == name), None)
    if name is None:
        return None
    usual = cluster(name, gpus)
    stated = re.search(r"(\d+) ?x ?(\d+) ?gb", row.text)
    network = (int(stated[1]), float(stated[2])) if stated else None
    for pattern, known in _NETWORKS.items():
        if re.search(pattern, row.text):
            network = known
    if network is None or len(usual.levels) == 1:
        return usual
    return with_network(usual, nics=network[0], nic_bandwidth=network[1] * 1e9 / 8).resized(gpus)


def format_of(row: Row, cluster: Cluster, guesses: Guesses) -> str:
    """The number format of matrix products; if the row states none, fp16 on an A100 and bf16 on others."""
    text = row.words["precision"].lower()
    for name in FORMATS:
        if name in text:
            return name
    guess = "fp16" if cluster.device.name.startswith("A100") else "bf16"
    guesses["precision"] = guess
    return guess
