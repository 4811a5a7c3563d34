"""Rules across parts of the spec: one function per rule, one sentence that names the axis and the values."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.spec.arithmetic import divisors, nearest
from meshwright.spec.errors import UserError
from meshwright.spec.layout import ONE_STAGE, TWO_STAGES
from meshwright.spec.model import ModelSpec
from meshwright.spec.rules_moe_mla import SPARSE_RULES
from meshwright.spec.sections import Sections
from meshwright.spec.stages import even


def heads_share_keys(spec: Sections) -> None:
    """Grouped-query attention gives each key head the same number of query heads."""
    heads, kv_heads = spec.model.heads, spec.model.kv_heads
    if heads % kv_heads:
        raise UserError(
            f"model.kv_heads: {kv_heads} key-value heads do not divide {heads} heads; "
            f"try {nearest(kv_heads, divisors(heads))}"
        )


def rope_turns_pairs(spec: Sections) -> None:
    """Rotary positions turn pairs of a head's channels."""
    if spec.model.position == "rope" and spec.model.head_dim % 2:
        raise UserError(
            f"model.head_dim: {spec.model.head_dim} is odd, and rotary positions need an even one"
        )


def yarn_has_wavelengths(spec: Sections) -> None:
    """YaRN's ramp is over wavelengths that grow with the channel."""
    model = spec.model
    if model.rope_scaling is not None and model.rope_scaling.kind == "yarn" and model.rope_theta <= 1:
        raise UserError(
            f"model.rope_theta: {model.rope_theta} gives no growing wavelengths, as model.rope_scaling.kind "
            f"= 'yarn' needs; give more than 1, such as 10000"
        )


def sequence_fits_positions(spec: Sections) -> None:
    """Learned positions end at `max_seq_len`."""
    longest = spec.model.max_seq_len
    if spec.model.position == "learned" and spec.data.seq_len > longest:
        raise UserError(
            f"data.seq_len: {spec.data.seq_len} is more than the model's {longest} learned positions; "
            f"give at most {longest}"
        )


def schedule_takes_its_stages(spec: Sections) -> None:
    """A schedule is made for one stage a rank, for two, or for any number."""
    layout = spec.layout
    name, given = layout.schedule, layout.virtual
    needed = 1 if name in ONE_STAGE else 2 if name in TWO_STAGES else given
    if layout.pp == 1 or given is None or given == needed:
        return
    others = ["interleaved", "bfs", *{1: ONE_STAGE, 2: TWO_STAGES}.get(given, ())]
    raise UserError(
        f"layout.virtual: {given} stages a rank do not go with layout.schedule = '{name}', which has "
        f"{needed}; give layout.virtual = {needed}, or one of the schedules {', '.join(others)}"
    )


def stages_hold_every_layer(spec: Sections) -> None:
    """Stages are at most the layers, the embedding and the head; a list gives each of them its blocks."""
    layout, layers = spec.layout, spec.model.layers
    count = layout.pp * layout.chunks
    made = f"layout.pp = {layout.pp} x {layout.chunks} stages a rank"
    if count > layers + 2:
        key, fits = "pp", (layers + 2) // layout.chunks
        if layout.schedule not in TWO_STAGES and layout.chunks > 1 and layers + 2 >= layout.pp:
            key, fits = "virtual", (layers + 2) // layout.pp
        raise UserError(
            f"layout.{key}: {made} are {count} stages, more than model.layers = {layers} with the embedding "
            f"and the head; try layout.{key} = {max(1, fits)}"
        )
    cut = layout.stages
    if isinstance(cut, str):
        return
    if layout.pp == 1:
        raise UserError(
            f"layout.stages: {list(cut)} cuts a pipeline, but layout.pp is 1; give layout.pp, or 'even'"
        )
    if len(cut) != count or sum(cut) != layers:
        wrong = f"has length {len(cut)}, but {made} need {count} numbers"
        if len(cut) == count:
            wrong = f"is {sum(cut)} blocks, but model.layers = {layers}"
        raise UserError(
            f"layout.stages: {list(cut)} {wrong}; try {','.join(map(str, even(layers, count)))}, or 'even'"
        )


def experts_have_neighbours(spec: Sections) -> None:
    """The expert axis is folded out of dp x cp x tp, whose ranks are then neighbours."""
    layout = spec.layout
    if layout.order == "replicate-dp-pp-tp" and layout.ep * layout.etp > 1 and layout.pp > 1:
        raise UserError(
            f"layout.order: '{layout.order}' puts pipeline ranks between those of dp, over which layout.ep = "
            f"{layout.ep} x layout.etp = {layout.etp} would be folded; try 'replicate-pp-dp-tp'"
        )


def tensor_axis_divides(spec: Sections) -> None:
    """Tensor ranks have whole heads, equal shares of the feed-forward layer, and rows of the vocabulary."""
    model, tp = spec.model, spec.layout.tp
    for name, count in (("heads", model.heads), ("ffn", model.ffn)):
        if count % tp and (name != "ffn" or has_dense_layers(model)):
            raise UserError(
                f"layout.tp: {tp} tensor ranks do not divide model.{name} = {count}; "
                f"try {_nearest_tp(spec, tp)}"
            )
    if tp % model.kv_heads and model.kv_heads % tp:
        raise UserError(
            f"layout.tp: {tp} tensor ranks neither divide model.kv_heads = {model.kv_heads} nor are a "
            f"multiple of it; try {_nearest_tp(spec, tp)}"
        )
    if not every_rank_has_rows(model.vocab_size, tp):
        raise UserError(
            f"layout.tp: of {tp} tensor ranks the last would have no row of model.vocab_size = "
            f"{model.vocab_size}; try {_nearest_tp(spec, tp)}"
        )


def has_dense_layers(model: ModelSpec) -> bool:
    """True if some layer has a dense feed-forward layer of `ffn` channels."""
    return not all(map(model.has_experts, range(model.layers)))


def every_rank_has_rows(vocabulary: int, tp: int) -> bool:
    """True if each of `tp` tensor ranks holds a row of a vocabulary split into equal shares."""
    return (tp - 1) * -(-vocabulary // tp) < vocabulary


def _nearest_tp(spec: Sections, tp: int) -> int:
    model = spec.model
    fits = [
        size
        for size in divisors(model.heads)
        if (model.ffn % size == 0 or not has_dense_layers(model))
        and (size % model.kv_heads == 0 or model.kv_heads % size == 0)
        and every_rank_has_rows(model.vocab_size, size)
    ]
    return nearest(tp, fits)


def sequence_is_cut_evenly(spec: Sections) -> None:
    """Context ranks have a head and a tail of each sequence, tensor ranks equal shares of what is left."""
    length, cp, tp = spec.data.seq_len, spec.layout.cp, spec.layout.tp
    pieces = 2 * cp if cp > 1 else 1
    if length % pieces:
        raise UserError(
            f"data.seq_len: {length} is not cut into 2 x layout.cp = {pieces} equal pieces; "
            f"try layout.cp = {_nearest_cp(spec)}, or data.seq_len = "
            f"{max(pieces, round(length / pieces) * pieces)} and train.batch_tokens a multiple of it"
        )
    shared = spec.layout.sequence_parallel or spec.model.moe is not None
    if shared and length // cp % tp:
        unit = pieces * tp
        other = ", or layout.sequence_parallel = false"
        if spec.model.moe is not None:
            other = " (tensor ranks share the tokens that go to experts)"
        raise UserError(
            f"data.seq_len: the {length // cp} tokens of a context rank are not shared evenly by layout.tp = "
            f"{tp} ranks; try {max(unit, round(length / unit) * unit)}{other}"
        )


def _nearest_cp(spec: Sections) -> int:
    length, tp = spec.data.seq_len, spec.layout.tp if spec.layout.sequence_parallel else 1
    fits = [cp for cp in divisors(length) if cp == 1 or length % (2 * cp) == 0]
    return nearest(spec.layout.cp, [cp for cp in fits if length // cp % tp == 0] or [1])


def ulysses_has_heads(spec: Sections) -> None:
    """Ulysses deals the key-value heads of a tensor rank over the context axis."""
    layout, heads = spec.layout, spec.layout.local_kv_heads(spec.model.kv_heads)
    if layout.context_mode == "ulysses" and heads % layout.cp:
        raise UserError(
            f"layout.context_mode: 'ulysses' deals {heads} key-value heads of a tensor rank over layout.cp = "
            f"{layout.cp} ranks, which does not go; try cp = {nearest(layout.cp, divisors(heads))}, or "
            f"'ring', 'gather' or 'ring+ulysses'"
        )


def sharding_has_ranks(spec: Sections) -> None:
    """Hybrid sharding needs something to shard."""
    layout = spec.layout
    if layout.replicate > 1 and layout.zero == 0:
        raise UserError(
            f"layout.replicate: {layout.replicate} copies of a ZeRO group need layout.zero of 1, 2 or 3; "
            f"for plain replication give layout.dp = {layout.replicate * layout.dp}"
        )


def batch_is_whole(spec: Sections) -> None:
    """A batch is a whole number of samples on every rank, and of microbatches."""
    tokens, length, ranks = spec.train.batch_tokens, spec.data.seq_len, spec.layout.data_ranks
    unit = length * ranks
    if tokens % unit:
        fits = max(unit, round(tokens / unit) * unit)
        raise UserError(
            f"train.batch_tokens: {tokens} is not a multiple of data.seq_len {length} x "
            f"{ranks} data-parallel ranks = {unit}; try {fits}"
        )
    micro = spec.layout.micro_batch
    if micro is not None and spec.rank_sequences % micro:
        raise UserError(
            f"layout.micro_batch: {micro} does not divide the {spec.rank_sequences} sequences that each rank "
            f"has of train.batch_tokens {tokens}; try {nearest(micro, divisors(spec.rank_sequences))}"
        )


def stop_is_within(spec: Sections) -> None:
    """`stop_at` is a step of the run."""
    stop, total = spec.train.stop_at, spec.train.total_steps
    if stop is not None and stop > total:
        raise UserError(f"train.stop_at: {stop} is after the last step {total}; give at most {total}")


def warmup_is_within(spec: Sections) -> None:
    """Warm-up ends before the run does."""
    warmup, total = spec.train.warmup_steps, spec.train.total_steps
    if warmup is not None and warmup > total:
        raise UserError(
            f"train.warmup_steps: {warmup} is more than the run's {total} steps; give at most {total}"
        )


def one_corpus_or_a_mixture(spec: Sections) -> None:
    """A mixture replaces the corpus; the default corpus counts as not given."""
    data = spec.data
    if data.mixture and data.corpus != type(data).model_fields["corpus"].default:
        raise UserError(
            f"data.mixture: {', '.join(data.mixture)} with weights is given beside data.corpus = "
            f"{data.corpus!r}; give --data.corpus stdlib, the default, or add it to the mixture with a weight"
        )


def compiled_backwards_are_whole(spec: Sections) -> None:
    """A compiled block's backward is one program, which finds the gradients of its weights too."""
    whole = ("1f1b", "interleaved", "gpipe", "bfs")
    if spec.train.compile and spec.layout.pp > 1 and spec.layout.schedule not in whole:
        raise UserError(
            f"train.compile: true does not go with layout.schedule = {spec.layout.schedule!r}, which finds "
            f"the gradients of weights apart; try layout.schedule = '1f1b', or train.compile = false"
        )


RULES: tuple[Callable[[Sections], None], ...] = (
    heads_share_keys,
    rope_turns_pairs,
    yarn_has_wavelengths,
    sequence_fits_positions,
    *SPARSE_RULES,
    schedule_takes_its_stages,
    stages_hold_every_layer,
    tensor_axis_divides,
    experts_have_neighbours,
    sequence_is_cut_evenly,
    ulysses_has_heads,
    sharding_has_ranks,
    batch_is_whole,
    compiled_backwards_are_whole,
    stop_is_within,
    warmup_is_within,
    one_corpus_or_a_mixture,
)


def check(spec: Sections, ranks: int | None = None) -> None:
    """Apply every rule in order, `ranks_match` first where `ranks` is given; the first broken one raises."""
    if ranks is not None:
        ranks_match(spec, ranks)
    for rule in RULES:
        rule(spec)


def ranks_match(spec: Sections, ranks: int) -> None:
    """The processes that were started are the ranks of the layout (checked by the launcher)."""
    layout = spec.layout
    if ranks == layout.world_size:
        return
    raise UserError(
        f"layout: replicate={layout.replicate} x dp={layout.dp} x cp={layout.cp} x tp={layout.tp} x "
        f"pp={layout.pp} is {layout.world_size} ranks, but {ranks} were asked for; "
        f"{near_worlds(spec, ranks, '--nproc')}"
    )


def near_worlds(spec: Sections, ranks: int, flag: str) -> str:
    """Suggestion for a number of ranks: those of the layout, or another `layout.dp` that the run allows."""
    layout, words = spec.layout, f"try {flag} {spec.layout.world_size}"
    others = layout.world_size // layout.dp
    sizes = set(divisors(spec.batch_sequences)) - {layout.dp}
    for dp in sorted(sizes, key=lambda size: (abs(size * others - ranks), -size)):
        try:
            check(spec.model_copy(update={"layout": layout.model_copy(update={"dp": dp})}))
        except UserError:  # the next is further from what was asked
            continue
        return f"{words} or --layout.dp {dp}" + f" with {flag} {dp * others}" * (dp * others != ranks)
    return words
