"""Which program, device and number format a published run had, from what its row says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meshwright.hardware.cluster import Cluster, with_network
from meshwright.hardware.find import catalogue, cluster
from meshwright.planner.cost.software import STACKS, SoftwareStack
from meshwright.planner.validation.table import FORMATS

if TYPE_CHECKING:
    from meshwright.planner.validation.cases import Row
    from meshwright.planner.validation.infer_layout import Guess

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
"""Words of a source -> the program that it ran; the first that is there."""
_FUSED = 2207
"""Year and month of FlashAttention (Dao et al. 2022, arXiv 2205.14135) in programs."""
_NETWORKS = {r"bloom|bigscience|\btr11": (4, 100.0)}
"""Clusters whose network is not that of their GPU's usual node: NICs and Gbit/s of each.

Jean Zay's nodes of 8 A100 have 4 Omni-Path links of 100 Gbit/s (BigScience 2022, BLOOM's model card).
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


def program_of(row: Row) -> SoftwareStack:
    """The stack that a row's source names, or that its year and sharding tell."""
    text, zero = row.text, row.whole("zero")
    if zero == 3 and re.search(r"megatron|deepspeed|zero-3", text) and not re.search(r"fsdp|core", text):
        return STACKS["deepspeed-zero3"]
    for words, name in _PROGRAMS:
        if re.search(words, text):
            return STACKS[name]
    written = re.search(r"arxiv:(\d{4})\.", text)
    if zero == 3:
        return STACKS["fsdp"]
    if re.search(r"zero bubble|vtrain|korthikanti|sc21", text) or (written and int(written[1]) < _FUSED):
        return STACKS["megatron-2021"]
    return STACKS["megatron-core"]


def cluster_of(row: Row, gpus: int) -> Cluster | None:
    """The catalogue's cluster of the row's GPU, with the network that its source has."""
    named = row.words["gpu"].lower().replace("_", "-")
    name = next((found for words, found in _DEVICES if re.search(words, named)), None)
    if name is None:
        name = next((found for found in catalogue() if found in named or named.split("-")[0] == found), None)
    if name is None:
        return None
    found = cluster(name, gpus)
    told = re.search(r"(\d+) ?x ?(\d+) ?gb", row.text)
    network = (int(told[1]), float(told[2])) if told else None
    for words, facts in _NETWORKS.items():
        if re.search(words, row.text):
            network = facts
    if network is None or len(found.levels) == 1:
        return found
    return with_network(found, nics=network[0], nic_bandwidth=network[1] * 1e9 / 8).resized(gpus)


def format_of(row: Row, on: Cluster, guess: Guess) -> str:
    """The number format of matrix products."""
    text = row.words["precision"].lower()
    for name in FORMATS:
        if name in text:
            return name
    older = on.device.name.startswith("A100")
    guess.say("precision", "fp16" if older else "bf16")
    return "fp16" if older else "bf16"
