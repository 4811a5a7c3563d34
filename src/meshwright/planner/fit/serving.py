"""Serving a model on some GPUs by vLLM: weights in 16 bits or quantised, and the keys and values of a batch.

A replica is cut over tensor ranks, and over pipeline ranks where heads do not let it be; the GPUs that are
left have further replicas, and experts are dealt out over the tensor ranks of all. Caches are pages of
`PAGE_TOKENS` tokens, as those of `infer/paged_cache.py`; weights of linear layers in blocks have the bytes
that `quantise` writes. What else vLLM takes is in `vllm.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Literal

from meshwright.hardware.cluster import Device
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.uncertainty import (
    COMFORTABLE,
    fits_probability,
    fitting,
    memory_interval,
    room,
    spread,
)
from meshwright.planner.fit.bisection import doubled
from meshwright.planner.fit.command import serve_commands
from meshwright.planner.fit.published import (
    WORDS,
    is_packed,
    is_served,
    not_served,
    packed_bytes,
    published_weights,
)
from meshwright.planner.fit.vllm import vllm_room, working
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.generic import Memory
from meshwright.planner.rank_view import RankView, place_of, widths
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.arithmetic import divisors
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.load import from_tree
from meshwright.spec.low_precision_rules import rounded_in_blocks
from meshwright.spec.parameters import Parameter, Piece, parameters
from meshwright.spec.quantisation import GROUPS
from meshwright.spec.serving import PAGE_TOKENS, RESERVED_PAGES

MOST_SEQUENCES = 4096
"""Sequences of the largest batch that is tried."""
_SCALE = 2
"""Bytes of a scale."""

Format = Literal["bf16", "fp16", "int8", "fp8", "int4", "mxfp4", "fp8-blockwise"]
"""Formats of served weights; the last two are those of published ones alone, which `quantise` does not
write."""
SIXTEEN: tuple[Format, ...] = ("bf16", "fp16")
"""Formats of 16 bits, in which no weight is rounded in blocks."""
_UNPACKS = 7, 5
"""Least compute capability of a GPU on which vLLM has kernels for weights that `quantise` writes: none on
Volta. Source: vLLM's documentation, 2026, table of quantisation by hardware."""


@dataclass(frozen=True)
class ServingFit:
    """Serving in one format, and how it fits; `spec` is None where it cannot be had, for the `reason`."""

    format: Format
    costs: CostModel
    batch: int
    """Sequences at a time on a replica."""
    length: int
    """Tokens of each sequence, prompt and continuation."""
    spec: RunSpec | None = None
    reason: str | None = None
    model: str = "RUN"
    """The folder that is served, or what stands for it."""

    @property
    def commands(self) -> list[str]:
        """The commands that write the weights and serve them; none where it does not fit."""
        if self.spec is None or not self.fits:
            return []
        return serve_commands(self.spec, self.format, self.model, self.batch, self.length)

    def memory(self, batch: int, length: int) -> Memory:
        """Bytes of the fullest GPU with so many sequences of so many tokens."""
        assert self.spec is not None
        return served(self.costs, self.spec, self.format, batch, length)

    @property
    def needs(self) -> Memory:
        """Bytes of the fullest GPU."""
        return self.memory(self.batch, self.length)

    @property
    def probability(self) -> float:
        """Probability that it fits a GPU."""
        if self.spec is None:
            return 0.0
        return fits_probability(self.needs.device, self._room(self.needs), self._wider)

    @property
    def fits(self) -> bool:
        """True if it fits a GPU more likely than not."""
        return self.probability >= 0.5

    @property
    def interval(self) -> tuple[float, float]:
        """Bytes between which a GPU's need is in 9 of 10 cases."""
        return memory_interval(self.needs.device, self._wider)

    def _room(self, needs: Memory) -> float:
        return vllm_room(needs, room(self.costs.cluster))

    @property
    def _wider(self) -> float:
        return spread(self.costs.cluster, self.costs.stack)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences that surely fit at this batch, at most those that the model knows
        or that are asked about."""
        longest = 0 if self.spec is None else max(self.spec.model.max_seq_len, self.length)
        most = longest // PAGE_TOKENS
        return PAGE_TOKENS * doubled(lambda pages: self._holds(self.batch, PAGE_TOKENS * pages), 1, most)

    @property
    def largest_batch(self) -> int:
        """Sequences of the largest batch of this length that surely fits a replica."""
        most = 0 if self.spec is None else MOST_SEQUENCES
        return doubled(lambda batch: self._holds(batch, self.length), 1, most)

    def _holds(self, batch: int, length: int) -> bool:
        needs = self.memory(batch, length)
        return needs.device <= fitting(self._room(needs), self._wider)

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes are those of the fullest GPU."""
        found = {"format": self.format, "fits": self.fits, "reason": self.reason}
        if self.spec is None:
            return found
        (low, high), layout = self.interval, self.spec.layout
        return found | {
            "bytes": {"low": low, "expected": self.needs.device, "high": high},
            "fits_probability": self.probability,
            "weights": self.needs.parameters,
            "cache": self.needs.activations,
            "layout": layout.model_dump(mode="json"),
            "layout_words": layout.describe(),
            "replicas": layout.dp,
            "batch": self.batch,
            "length": self.length,
            "longest_length": self.longest,
            "largest_batch": self.largest_batch,
            "commands": self.commands,
        }


def serving_fits(
    model: ModelSpec, costs: CostModel, batch: int, length: int, folder: str
) -> Iterator[ServingFit]:
    """How serving fits in each format that this program writes, and the device computes or unpacks; and in
    the format of weights that are published in blocks."""
    for form in formats(costs.cluster.device):
        unserved = ServingFit(form, costs, batch, length, model=folder)
        if (reason := _not_written(model, form) or _not_unpacked(costs.cluster.device, form)) is not None:
            yield replace(unserved, reason=reason)
        else:
            yield _on_fewest(unserved, model)
    if (published := published_weights(model)) is not None:
        unserved = ServingFit(published.form, costs, batch, length, model=published.source)
        reason = not_served(costs.cluster.device, published.form)
        yield _on_fewest(unserved, model) if reason is None else replace(unserved, reason=reason)


def formats(device: Device) -> list[Format]:
    """The formats that serving on a device may be in: its own of 16 bits first."""
    plain: Format = "fp16" if device.default_format == "fp16" else "bf16"
    return [plain, "int8", "fp8", "int4"] if "fp8" in device.peak else [plain, "int8", "int4"]


def _not_unpacked(device: Device, form: Format) -> str | None:
    """Why a device does not serve weights in a format; None where it does."""
    if form in SIXTEEN or device.capability is None or device.capability >= _UNPACKS:
        return None
    return f"vLLM has no kernels for weights in {form} on {device.name}; serve them in 16 bits"


def _on_fewest(unserved: ServingFit, model: ModelSpec) -> ServingFit:
    """How serving fits on the fewest GPUs for a replica that do comfortably, or else on the cut that needs
    least."""
    count = unserved.costs.cluster.count
    cuts = (spec for spec in layouts(model, count) if has_kernels(spec, unserved.format))
    found = [replace(unserved, spec=spec) for spec in cuts]
    if not found:
        reason = f"no cut of {model.heads} heads and {model.layers} layers is one of {count:,} GPUs"
        return replace(unserved, reason=f"{reason}; give another --count")
    enough = next((each for each in found if each.probability >= COMFORTABLE), None)
    return enough or min(found, key=lambda each: each.needs.device)


def has_kernels(spec: RunSpec, form: Format) -> bool:
    """True if vLLM's kernels take the shares of ranks of weights that are published in a format."""
    if form not in WORDS:
        return True
    views = (place_of(spec, rank) for rank in range(spec.layout.pp))
    pieces = (each for view in views for listed in view.pieces().values() for each in listed)
    return all(is_served(parameter, piece, form) for parameter, piece in pieces)


def _not_written(model: ModelSpec, form: Format) -> str | None:
    """Why `quantise` does not write a model in a format; None where it does."""
    family = FAMILIES[model.family]
    if form in SIXTEEN:
        return None
    if family.names.transposed or (model.moe is not None and family.expert_names.joint is not None):
        return f"quantise: {model.family} has layers that compressed-tensors does not know"
    if model.moe is not None and form == "fp8":
        return "quantise: fp8 rounds inputs of experts, which programs do in different ways"
    if form == "int4" and group_of(model) is None:
        return f"quantise: {GROUPS[-1]} columns share a scale in int4, and do not divide all widths"
    return None


def layouts(model: ModelSpec, count: int) -> Iterator[RunSpec]:
    """The layouts of so many GPUs that the rules take: the fewest GPUs for a replica first, and of these the
    most tensor ranks.

    vLLM deals experts to all tensor and data ranks of a stage (`--enable-expert-parallel`), so that replicas
    share them; where their number does not divide so, they are cut by tensor ranks.
    """
    length = min(model.max_seq_len, 512)  # rules ask for a batch, which serving has not
    for each in divisors(count):
        for tp in reversed(divisors(each)):
            dp = count // each
            shares = model.moe is not None and model.moe.experts % (tp * dp) == 0
            layout = {"tp": tp, "pp": each // tp, "dp": dp, "ep": tp * dp if shares else 1}
            tree = {
                "model": model.model_dump(mode="json"),
                "layout": {**layout, "sequence_parallel": False, "micro_batch": 1},
                "data": {"seq_len": length},
                "train": {"batch_tokens": length * count // tp},
                "recompute": {"policy": "none"},
                "precision": {"compute": "bf16", "master": "bf16"},
            }
            try:
                yield from_tree(tree)
            except UserError:  # a cut that the model does not have
                continue


def served(costs: CostModel, spec: RunSpec, form: Format, batch: int, length: int) -> Memory:
    """Bytes of the fullest GPU of a replica that holds `batch` sequences of `length` tokens."""
    return max(
        (_on_rank(costs, place_of(spec, rank), rank, form, batch, length) for rank in range(spec.layout.pp)),
        key=lambda memory: memory.allocated,
    )


def _on_rank(costs: CostModel, view: RankView, rank: int, form: Format, batch: int, length: int) -> Memory:
    tokens = PAGE_TOKENS * (batch * ceil(length / PAGE_TOKENS) + RESERVED_PAGES)
    weights = weight_bytes(view, form, costs.cluster.device)
    cache = view.layers * tokens * cached_bytes(view.spec)
    terms = (weights, 0.0, 0.0, cache, 0.0, working(view, batch))
    return memory_model(costs).on_device(view.spec.layout, rank, terms)


def weight_bytes(view: RankView, form: Format, device: Device) -> float:
    """Bytes of a rank's weights, with linear layers of blocks in a format."""
    group, width = group_of(view.spec.model), widths(view.spec).compute
    total = 0.0
    for parameter, piece in (each for listed in view.pieces().values() for each in listed):
        elements = prod(piece.local_shape)
        if form in WORDS:
            packed = is_packed(parameter, form)
            total += packed_bytes(view, device, piece, form) if packed else elements * width
        elif form not in SIXTEEN and rounded_in_blocks(parameter):
            total += _quantised(parameter, piece, elements, form, group)
        else:
            total += elements * width
    return total


def _quantised(p: Parameter, piece: Piece, elements: int, form: Format, group: int | None) -> int:
    if form == "int4":
        assert group is not None
        return elements // 2 + _SCALE * elements // group
    return elements + _SCALE * elements // piece.local_shape[-1]


def group_of(model: ModelSpec) -> int | None:
    """Columns that share a scale in int4, as `quantise` chooses them; None where it has no such number."""
    listed = (each for unit in parameters(model).values() for each in unit)
    columns = {each.shape[-1] for each in listed if rounded_in_blocks(each)}
    return next((group for group in GROUPS if not any(each % group for each in columns)), None)


def cached_bytes(spec: RunSpec) -> int:
    """Bytes of the keys and values of a token in one block of a rank."""
    model, width = spec.model, widths(spec).compute
    if model.mla is not None:
        return width * (model.mla.kv_rank + model.mla.rope_dim)
    return width * 2 * max(1, model.kv_heads // spec.layout.tp) * model.head_dim
