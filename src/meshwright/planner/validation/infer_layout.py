"""How a published run was laid out, from its row, and from its program's habits where it does not say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.planner.cost.software import SoftwareStack
from meshwright.spec import Layout, ModelSpec, RunSpec
from meshwright.spec.sections import FullRecompute, NoRecompute, SelectiveRecompute

if TYPE_CHECKING:
    from meshwright.planner.validation.cases import Row

_SCHEDULES = {
    "zb-2p": "zb-h2",
    "zb-h2": "zb-h2",
    "zb-1p": "zb-h1",
    "zb-h1": "zb-h1",
    "zb-v": "zb-v",
    "1f1b-i": "interleaved",
    "interleaved": "interleaved",
    "gpipe": "gpipe",
    "dualpipe": "dualpipe-v",
    "1f1b": "1f1b",
}
_POLICIES = {"none": NoRecompute(), "full": FullRecompute(), "selective": SelectiveRecompute()}
_TRIED = (1, 2, 4, 8, 16)
"""Sequences of a microbatch that authors are taken to have chosen from, where they do not say."""


_MOST_VIRTUAL = 4
"""Stages of a pipeline rank that authors are taken to have tried."""


@dataclass
class Guess:
    """What a row did not say, and what it was taken for."""

    said: list[str] = field(default_factory=list)

    def say(self, name: str, value: object) -> None:
        """Remember an inference."""
        text = f"{name} = {value}"
        if text not in self.said:
            self.said.append(text)


def layout_of(row: Row, gpus: int, program: SoftwareStack, model: ModelSpec, guess: Guess) -> Layout | str:
    """The layout but for what `choices` tries, or why there is none."""
    tp, cp, pp = (row.whole(name) or 1 for name in ("tp", "cp", "pp"))
    if gpus % (tp * cp * pp):
        return f"tp x cp x pp = {tp * cp * pp} does not divide its {gpus} GPUs"
    dp = gpus // (tp * cp * pp)
    zero = row.whole("zero")
    if zero is None:
        zero = program.habitual_zero
        guess.say("zero", zero)
    shared = row.words["sequence_parallel"].lower()
    if not shared and tp > 1:
        guess.say("sequence_parallel", "yes" if program.habitual_sequence_parallel else "no")
    sequence = shared == "yes" if shared else program.habitual_sequence_parallel
    schedule, virtual = _schedule(row, pp)
    return Layout.model_validate(
        {
            "dp": dp,
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "zero": min(3, max(0, zero)),
            "ep": row.whole("ep") or 1,
            "sequence_parallel": sequence,
            "schedule": schedule,
            "virtual": virtual,
        }
    )


def contradiction(row: Row, layout: Layout, model: ModelSpec, batch: int) -> str | None:
    """Why a layout cannot have been run with the row's batch and model, or None."""
    stages, folded = layout.pp * (layout.virtual or 1), layout.data_ranks * layout.cp * layout.tp
    if stages > model.layers + 2:
        return f"pp x vp = {stages} stages are more than its {model.layers} layers"
    if model.moe is not None and model.moe.top_k > model.moe.experts:
        return f"top_k = {model.moe.top_k} is more than its {model.moe.experts} experts"
    if model.moe is not None and model.moe.experts % layout.ep:
        return f"ep = {layout.ep} does not divide its {model.moe.experts} experts"
    if folded % layout.ep:
        return f"ep = {layout.ep} does not divide the {folded} GPUs of a stage"
    if batch % layout.data_ranks:
        return f"{batch} sequences are not shared evenly by {layout.data_ranks} data ranks"
    each, micro = batch // layout.data_ranks, row.whole("micro_batch")
    if micro and micro > each:
        return f"micro_batch = {micro} is more than the {each} sequences of a data rank"
    return None


def _schedule(row: Row, pp: int) -> tuple[str, int | None]:
    """The schedule that the row names, or what its virtual stages mean."""
    virtual = row.whole("vp")
    named = re.search(r"schedule ?= ?([\w*-]+)", row.words["where"].lower())
    name = _SCHEDULES.get(named[1].rstrip("*"), "1f1b") if named else "1f1b"
    if name == "1f1b" and virtual and virtual > 1 and pp > 1:
        name = "interleaved"
    return name, (virtual or 2) if name == "interleaved" else None


def batch_of(row: Row, table: Sequence[Row], layout: Layout, guess: Guess) -> int | None:
    """Sequences of a step: the row's, or those of a data rank in another row of the same table and model."""
    if (batch := row.whole("global_batch_seqs")) is not None:
        return batch
    alike = ("source", "model")
    for other in table:
        if "broken" in other.words:
            continue
        sequences, gpus = other.whole("global_batch_seqs"), other.whole("gpus")
        if sequences is None or not gpus or any(other.words[name] != row.words[name] for name in alike):
            continue
        model_ranks = (other.whole("tp") or 1) * (other.whole("cp") or 1) * (other.whole("pp") or 1)
        ranks = max(1, gpus // model_ranks)
        found = sequences * layout.data_ranks // ranks
        guess.say("global_batch_seqs", f"{found}, as in another row of its table")
        return found
    return None


def recomputes(row: Row, guess: Guess) -> list[Any]:
    """The policy that the row names; where it names none, every one, the least first."""
    name = row.words["recompute"].lower()
    if name in _POLICIES:
        return [_POLICIES[name]]
    guess.say("recompute", "the least that fits")
    return list(_POLICIES.values())


def choices(
    row: Row, base: RunSpec, program: SoftwareStack, policies: Sequence[Any], guess: Guess
) -> Iterator[RunSpec]:
    """The runs that the row may mean: microbatch, virtual stages, recomputation where it does not say."""
    layout, batch = base.layout, base.batch_sequences
    if batch % layout.data_ranks:
        return
    each = batch // layout.data_ranks
    micro = row.whole("micro_batch")
    sizes: list[int] = [micro] if micro else []
    if not sizes and program.microbatches_are_stages and layout.pp > 1:
        sizes = [max(1, each // layout.pp)]
        guess.say("micro_batch", f"{sizes[0]}, as many microbatches as pipeline ranks")
    elif not sizes:
        sizes = [size for size in _TRIED if each % size == 0]
        guess.say("micro_batch", "the fastest that fits")
    untold = row.whole("vp") is None and "schedule" not in row.words["where"].lower()
    tuned = untold and (program.tuned == "always" or (program.tuned == "untold" and not micro))
    for policy in policies:
        for size in sizes:
            for schedule, virtual in _interleavings(base, each // size, tuned, program.tuned == "always"):
                changed = {"micro_batch": size, "schedule": schedule, "virtual": virtual}
                yield base.model_copy(
                    update={"layout": layout.model_copy(update=changed), "recompute": policy}
                )


def _interleavings(
    base: RunSpec, microbatches: int, tuned: bool, uneven: bool
) -> Iterator[tuple[str, int | None]]:
    """(schedule, stages a rank): the row's, and where its authors may have tuned it, interleaved ones."""
    layout, layers = base.layout, base.model.layers
    if layout.schedule == "interleaved" and microbatches % layout.pp:
        yield "1f1b", None
        return
    yield layout.schedule, layout.virtual
    if not tuned or layout.pp == 1 or microbatches % layout.pp:
        return
    for virtual in range(2, _MOST_VIRTUAL + 1):
        if layers % (layout.pp * virtual) == 0 or (uneven and layout.pp * virtual <= layers + 2):
            yield "interleaved", virtual
