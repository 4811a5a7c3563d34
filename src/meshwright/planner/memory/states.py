"""Bytes of parameters, gradients and optimiser states that one rank of this program holds.

A unit (the embedding, a block without routed experts, its routed experts, the head) has its parameters in
one buffer, of which each of n ranks stores a part; rows that n does not divide are padded. With b bytes to
compute in, r for reductions, m for stored weights and e for exact sums (m is 2 with `precision.master` =
bf16, else m = e), its P numbers, padding included, take (cf. Rajbhandari et al. 2020, section 3):

                    compute copy    stored      gradients               two moments
    n = 1           P b, or none    P m         P r, and P e or none    2 P e
    ZeRO-1          P b             P m / n     P r, or P e             2 P e / n
    ZeRO-2          P b             P m / n     P e / n                 2 P e / n
    ZeRO-3          none            P m / n     P e / n                 2 P e / n

"or none" where both formats are equal: then both are the same memory. With several microbatches, gradients
of ZeRO-1, and of a pipeline in ZeRO-2 and 3 too, wait whole for the step's last microbatch and are added up
exactly: P e instead of P r, also for n = 1, where that is then their only memory.
Otherwise they are reduced as they arise. Parameters that are not trained are units of their own, of P b
bytes, or P b / n with ZeRO-3, and nothing else; those of a quantised base, too, with what their codes and
scales take in the place of P b, and a copy that computes only while it is used. AdamW has two moments, and
counts its steps in a number of 4 bytes for each run of adjacent parameters of a unit that are updated alike
(matrices and the rest, where no pattern divides them), but for weights in bf16; Lion has one, and Muon has
one of matrices of blocks. In 8 bits (`adamw8bit`) a moment of a matrix takes a byte for a number and e for a
block of them, and a rank has two maps besides, each of 256 values and thresholds and 65536 codes. Moments
that `train.offload` keeps elsewhere take no bytes of the device, but for the pieces of them that pass through
a GPU in an update (`optim/offload.py`), which then needs no such counts. A moving average of the weights
(`train.ema`) takes what one moment does, on the device. What groups of ranks that step apart hold for their
exchanges is in `planner/traffic/exchange.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby

from meshwright.planner.rank_view import RankView, Widths, gathered_bytes, part_elements, place_of, widths
from meshwright.planner.traffic import exchange
from meshwright.planner.traffic.layer_shape import balance_counts
from meshwright.schedule import Action, Kind, make
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import MAP_SIZE, PREFIXES, block_of
from meshwright.spec.low_precision_rules import rounded_parameters
from meshwright.spec.parameter_groups import group_of, run_parameters
from meshwright.spec.parameters import UNIT_KINDS, Parameter, Piece
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.precision import DELAYED
from meshwright.spec.tiling import tiling

SLOTS = 3
"""Pieces of each offloaded moment on a device: one comes, one is updated, one goes back."""
STEP_COUNT, EXACT_COUNT, BIAS, SCALE, LACKING = 4, 8, 4, 4, 4
"""Bytes of Adam's step count, of one count of the experts' load, of a router's bias, of a tensor's scale, of
what bounded messages to experts lacked room for."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank, each at its own peak within a step."""

    parameters: int
    """The copy that computes, where it lasts through the step; with ZeRO-3 it is a buffer."""
    masters: int
    """The copy that the optimiser updates, where it is another one."""
    gradients: int
    optimiser: int
    """Moments, AdamW's counts of steps, and the moving average of the weights."""
    balance: int
    """The routers' biases, and counts of the experts' load."""
    scaling: int
    """Delayed scaling's scales, the largest numbers of this step, and those of the steps before."""
    exchange: int
    """Numbers that replicas which step apart keep for exchanges of their parameters."""

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, eq=False)
class StateShard:
    """Parameters that are gathered and reduced together; `part` are the elements on one of `ranks` ranks."""

    name: str
    routed: bool
    trainable: bool
    quantised: bool
    ranks: int
    part: int
    decays: int
    """Elements of the part with weight decay."""
    blocks: int
    """Blocks of these that share a scale in 8-bit moments."""
    zero: int
    """The stage of ZeRO."""
    sent: int
    """Bytes of a rank's part as it is gathered; of one that is quantised, as it is stored, too."""
    counts: int
    """Counts of steps that AdamW has of it."""

    @property
    def whole(self) -> int:
        """Elements over all ranks, padding included."""
        return self.ranks * self.part

    def aliased(self, width: Widths) -> bool:
        """True if the copy that computes is the one that is stored."""
        return self.ranks == 1 and self.master(width) == width.compute and not self.quantised

    @property
    def passing(self) -> bool:
        """True if the copy that computes is there only where it is used."""
        return self.zero == 3 or self.quantised

    def stored(self, width: Widths) -> int:
        """Bytes of a rank's part as it is stored."""
        return self.sent if self.quantised else self.part * self.master(width)

    def master(self, width: Widths) -> int:
        """Bytes of a number as it is stored: what is not trained is stored as it computes."""
        return width.master if self.trainable else width.compute


def states(spec: RunSpec, pipeline_rank: int = 0) -> States:
    """States of a rank of the pipeline, to the byte."""
    view = place_of(spec, pipeline_rank)
    return states_at(view, units(view))


def states_at(view: RankView, shards: Sequence[StateShard], staged: bool = False) -> States:
    """States of a rank that holds `shards`; `staged` if offloaded moments pass through its device."""
    width, model, moe = widths(view.spec), view.spec.model, view.spec.model.moe
    train = view.spec.train
    parameters = masters = optimiser = 0
    trained = [unit for unit in shards if unit.trainable]
    staged = staged and train.offload != "none"
    if train.offload == "none":
        optimiser = moment_bytes(view, shards)
    elif staged and trained:
        length = min(tiling().moment_elements, max(unit.part for unit in trained))
        optimiser = SLOTS * len(train.moments) * length * width.exact
    for unit in shards:
        if unit.aliased(width):
            parameters += unit.stored(width)
        else:
            masters += unit.stored(width)
            parameters += 0 if unit.passing else unit.whole * width.compute
    for unit in trained:
        optimiser += width.exact * unit.part if train.ema is not None else 0
        if view.spec.precision.master == "fp32" and not staged:
            optimiser += STEP_COUNT * unit.counts
    balance = 0
    if moe is not None:
        biases = view.routed * moe.experts if moe.bias else 0
        balance = EXACT_COUNT * balance_counts(model, moe) + BIAS * biases
        balance += LACKING * view.spec.layout.bounds_dispatch
    gradients = _gradients(view, trained)
    held = exchange.bytes_held(view)
    return States(parameters, masters, gradients, optimiser, balance, _scaling(view.spec), held)


def _scaling(spec: RunSpec) -> int:
    """Bytes of the scales of whole tensors, which every rank has of all matrices."""
    if spec.precision.compute not in DELAYED:
        return 0
    operands = 3 * sum(1 for _ in rounded_parameters(spec))
    return SCALE * operands * (2 + spec.precision.amax_history)


def moment_bytes(view: RankView, shards: Sequence[StateShard]) -> int:
    """Bytes of the moments of a rank that holds `shards`, wherever they are."""
    shards = [unit for unit in shards if unit.trainable]
    exact, kind = widths(view.spec).exact, view.spec.train.optimiser_kind
    if kind.eight_bit:
        numbers = (unit.decays + exact * (unit.blocks + unit.part - unit.decays) for unit in shards)
        return len(kind.moments) * (sum(numbers) + 2 * MAP_SIZE * exact + PREFIXES)
    fewer = len(kind.moments) - len(kind.matrix_moments)
    of_blocks = sum(unit.decays for unit in shards if unit.name.startswith("blocks."))
    return exact * (len(kind.moments) * sum(unit.part for unit in shards) - fewer * of_blocks)


def checkpoint_bytes(spec: RunSpec) -> int:
    """Bytes of trained parameters, moments and moving averages of all ranks, as they are stored.

    Groups of ranks that step apart have them each, and numbers of their exchanges besides. Sums that are
    under way are left out.
    """
    width, total = widths(spec), 0
    averages = int(spec.train.ema is not None)
    for p in (p for unit in run_parameters(spec).values() for p in unit if p.trainable):
        each = width.exact * p.size
        stored = (width.master + width.exact * averages) * p.size
        if spec.train.optimiser_kind.eight_bit and p.is_matrix:
            each = p.size + width.exact * (p.size // block_of(p, spec.model.heads))
        stored += each * len(spec.train.moments_of(p.name, len(p.shape)))
        stored += width.exact * p.size * exchange.own_numbers(spec)
        total += spec.step_groups * stored + width.exact * p.size * exchange.shared_numbers(spec)
    return total


def units(view: RankView, known: dict[object, list[StateShard]] | None = None) -> list[StateShard]:
    """The units of a rank in the order of its forward; routed experts follow the rest of their block, and of
    both what is not trained follows what is.

    `known` are units of other ranks of the same run by kind, to which those of this one are added.
    """
    layout, moe = view.spec.layout, view.spec.model.moe
    experts = layout.expert_data_ranks if moe is not None else 1
    zero = layout.zero if max(layout.shard_ranks, experts) > 1 else 0

    def shards(unit: str, listed: list[tuple[Parameter, Piece]]) -> Iterator[StateShard]:
        for kind in UNIT_KINDS:
            shared = zero and layout.shards(kind.trainable)
            ranks = (experts if kind.routed else layout.shard_ranks) if shared else 1
            held = [each for each in listed if each[1].kind == kind]
            if held:
                pieces = [piece for _, piece in held]
                part = sum(part_elements(piece, ranks) for piece in pieces)
                matrices = [(p, part_elements(piece, ranks)) for p, piece in held if p.is_matrix]
                decays = sum(size for _, size in matrices)
                blocks = sum(size // block_of(p, view.spec.model.heads) for p, size in matrices)
                sent = gathered_bytes(view.spec, pieces, ranks)
                counts = _adam_counts(view.spec, unit, pieces) if kind.trainable else 0
                yield StateShard(unit, *kind, ranks, part, decays, blocks, zero, sent, counts)

    if view.spec.train.lr_factors or view.spec.train.weight_decays:  # patterns may name a block
        return [shard for name, listed in view.pieces().items() for shard in shards(name, listed)]
    kinds, of_kind = view.kinds_of_units(), {} if known is None else known
    if not of_kind.keys() >= set(kinds.values()):
        pieces = view.pieces()
        for name, kind in kinds.items():
            if kind not in of_kind:
                of_kind[kind] = list(shards(name, pieces[name]))
    return [replace(shard, name=name) for name, kind in kinds.items() for shard in of_kind[kind]]


def _adam_counts(spec: RunSpec, unit: str, pieces: Iterable[Piece]) -> int:
    """Runs of adjacent parameters, in the order of a unit's buffers, that AdamW updates alike.

    Blocks share their pieces, which then have the names of another block.
    """
    alike = []
    for piece in sorted(pieces, key=lambda piece: (not piece.is_matrix, piece.summed)):
        name, dims = piece.key, len(piece.global_shape)
        if name.startswith("blocks."):
            name = f"{unit}.{name.split('.', 2)[2]}"
        kind = spec.train.optimiser_kind
        whole = kind.moments_of(name, dims) == kind.moments and not (kind.eight_bit and piece.is_matrix)
        if kind.counts and whole:
            alike.append((piece.is_matrix, group_of(spec, name, dims)))
    return sum(1 for _ in groupby(alike))


def waits(spec: RunSpec, unit: StateShard) -> bool:
    """True if a unit's gradients wait whole for the last microbatch."""
    several = spec.microbatches > 1
    return unit.ranks == 1 or (several and (unit.zero < 2 or spec.layout.pp > 1))


def gradients_meet(schedule: str, ranks: int, chunks: int, microbatches: int) -> bool:
    """True if each rank of a pipeline has gradients of all its stages, `chunks` of them, before any are
    complete."""
    if chunks == 1 and not SCHEDULES[schedule].splits:
        return microbatches > 1
    return not SCHEDULES[schedule].holds_all and microbatches >= 2 * ranks


def packed_width(view: RankView, unit: StateShard) -> int:
    """Bytes of an element of packed gradients, wider where several microbatches are added up."""
    width, spec = widths(view.spec), view.spec
    both_ends = (
        spec.layout.pp > 1 and spec.model.head_embeds and view.embed and view.head and unit.name == "embed"
    )
    several = waits(spec, unit) and (spec.microbatches > 1 or both_ends)
    return width.exact if several else width.reduce


def _gradients(view: RankView, shards: Sequence[StateShard]) -> int:
    """Peak bytes of gradients of trained `shards`. A reduction is waited for one block later."""
    width, events = widths(view.spec), list(_events(view, shards))
    packed = {unit: unit.whole * packed_width(view, unit) for unit in shards if waits(view.spec, unit)}
    left, depth = Counter(events), Counter(unit.name for unit in shards)
    held = most = 0
    begun: set[StateShard] = set()
    summed: set[StateShard] = set()
    pending: deque[StateShard] = deque()

    def finish(unit: StateShard) -> None:
        nonlocal held, most
        if unit not in summed and (unit.ranks > 1 or packed[unit] != unit.whole * width.exact):
            held += unit.part * width.exact
        summed.add(unit)
        most = max(most, held)

    for unit in events:
        if unit not in begun and unit in packed:
            held += packed[unit]
        begun.add(unit)
        most = max(most, held)
        left[unit] -= 1
        if left[unit] and unit in packed:
            continue
        if unit.ranks > 1 and unit in packed:
            held -= packed[unit]
        pending.append(unit)
        while len(pending) > depth[unit.name]:
            finish(pending.popleft())
    for unit in pending:
        finish(unit)
    return most


@lru_cache(maxsize=4096)
def _turning(name: str, ranks: int, virtual: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The first two and the last backward of each kind in each of a rank's stages: others hold no more."""
    actions = make(name, ranks, virtual, microbatches).actions[rank]
    backwards = [action for action in actions if action.kind is not Kind.F]
    places = defaultdict[tuple[Kind, int], list[int]](list)
    for place, (kind, stage, _) in enumerate(backwards):
        places[kind, stage].append(place)
    turning = {place for listed in places.values() for place in (*listed[:2], listed[-1])}
    return tuple(backwards[place] for place in sorted(turning))


def _events(view: RankView, shards: Sequence[StateShard]) -> Iterator[StateShard]:
    """The units of a rank in the order in which its schedule's actions find gradients of them."""
    own = {stage.index: stage for stage in view.own}
    by_name: dict[str, list[StateShard]] = {}
    for unit in shards:
        by_name.setdefault(unit.name, []).insert(0, unit)  # experts come first in a backward
    lists = view.schedule

    def of_block(block: int, action: Action) -> Iterator[StateShard]:
        found = by_name.get(f"blocks.{block}", ())
        return (unit for unit in found if not (unit.routed and action.kind is Kind.I))

    for action in _turning(lists.name, lists.ranks, lists.virtual, lists.microbatches, view.rank):
        stage = own[action.stage]
        ends_too = action.kind is not Kind.W
        joined = view.spec.model.head_embeds and view.embed and view.head
        head = by_name.get("embed" if joined else "head", ()) if stage.head and ends_too else ()
        if stage.beyond:  # of the head they find the last norm's first
            yield from head
        for block in reversed(stage.beyond):
            yield from of_block(block, action)
        yield from head
        for block in reversed(stage.blocks):
            yield from of_block(block, action)
        if stage.embed and ends_too:
            yield from by_name.get("embed", ())
