"""Rules of `train.cuda_graphs`: what a microbatch launches is the same for each, and the host waits for none
of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.spec.errors import UserError
from meshwright.spec.sections import Sections


class NotCapturable(NamedTuple):
    """A value of a run that a recorded microbatch cannot hold."""

    what: str
    """The key with its value."""
    why: str
    """A clause about it."""
    instead: str
    """A value that goes with graphs."""


def microbatches_are_the_same_work(spec: Sections) -> None:
    """A graph launches what was recorded, with the addresses and numbers that the host had then."""
    found = next(_obstacles(spec), None) if spec.train.cuda_graphs else None
    if found is not None:
        raise UserError(
            f"train.cuda_graphs: true does not go with {found.what}, {found.why}; give {found.instead}, or "
            f"train.cuda_graphs = false"
        )


def captured_axes(spec: Sections, bounded: bool) -> dict[str, tuple[int, ...]]:
    """Key of the layout -> the values that go with the run's graphs; nothing for a run without.

    `bounded` is True where messages to experts are.
    """
    if not spec.train.cuda_graphs:
        return {}
    return {"pp": (1,), "cp": (1,), "zero": (0, 1, 2)} | ({} if bounded else {"ep": (1,), "etp": (1,)})


def _obstacles(spec: Sections) -> Iterator[NotCapturable]:
    yield from _of_layout(spec)
    yield from _of_samples(spec)
    lora, moe, train = spec.lora, spec.model.moe, spec.train
    if spec.model.mtp_num_layers:
        yield NotCapturable(
            f"model.mtp_num_layers = {spec.model.mtp_num_layers}",
            "whose losses the host lists by microbatch",
            "model.mtp_num_layers = 0",
        )
    if moe is not None and moe.capacity_factor is not None:
        yield NotCapturable(
            f"model.moe.capacity_factor = {moe.capacity_factor:g}",
            "for which the host places tokens in each microbatch",
            "model.moe.capacity_factor = 'none'",
        )
    if moe is not None and spec.precision.base != "bf16":
        yield NotCapturable(
            f"experts in {spec.precision.base}",
            "which are computed one by one from numbers that the host waits for",
            "precision.compute = 'bf16'",
        )
    if train.offload_activations != "none":
        yield NotCapturable(
            f"train.offload_activations = {train.offload_activations!r}",
            "which the host moves block by block",
            "train.offload_activations = 'none'",
        )
    if lora is not None and lora.dropout:
        yield NotCapturable(
            f"lora.dropout = {lora.dropout:g}",
            "whose keys the host draws for each microbatch",
            "lora.dropout = 0",
        )
    if lora is not None and lora.base_format is not None:
        yield NotCapturable(
            f"lora.quantise = {lora.quantise!r}",
            "whose weights are in other memory in each microbatch",
            "lora.quantise = 'none'",
        )
    if spec.precision.compute == "nvfp4":
        yield NotCapturable(
            "precision.compute = 'nvfp4'",
            "which draws random numbers for its gradients",
            "precision.compute = 'fp8-rowwise'",
        )


def _of_layout(spec: Sections) -> Iterator[NotCapturable]:
    layout, moe = spec.layout, spec.model.moe
    if layout.pp > 1:
        yield NotCapturable(
            f"layout.pp = {layout.pp}", "whose microbatches are under way together", "layout.pp = 1"
        )
    if layout.cp > 1:
        yield NotCapturable(
            f"layout.cp = {layout.cp}",
            "for which the host plans attention in each microbatch",
            "layout.cp = 1, with layout.tp for longer sequences",
        )
    if layout.zero == 3 and max(layout.shard_ranks, layout.expert_data_ranks if moe else 1) > 1:
        yield NotCapturable(
            "layout.zero = 3",
            "which gathers parameters into other memory in each microbatch",
            "layout.zero = 2",
        )
    if moe is not None and layout.ep * layout.etp > 1 and not layout.bounds_dispatch:
        yield NotCapturable(
            f"layout.ep = {layout.ep}" if layout.ep > 1 else f"layout.etp = {layout.etp}",
            "where the host waits for the numbers of tokens of experts",
            "layout.expert_buffer_factor = 2, which bounds them",
        )


def _of_samples(spec: Sections) -> Iterator[NotCapturable]:
    for table, deed in spec.tables_of_steps.items():
        yield NotCapturable(f"[{table}]", f"with which a step {deed}", f"no [{table}]")
    if spec.data.pack and spec.data.document_mask:
        yield NotCapturable(
            "data.document_mask = true",
            "for which the host plans attention in each microbatch",
            "data.document_mask = false, or data.pack = false",
        )
    windows = [kind.window for kind in spec.model.kinds if kind.window is not None]
    if windows and min(windows) < spec.data.seq_len:
        yield NotCapturable(
            f"windows of {min(windows)} tokens",
            "for which the host plans attention in each microbatch",
            f"data.seq_len = {min(windows)} at most",
        )
