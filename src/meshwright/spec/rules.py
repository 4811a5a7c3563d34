"""Rules across sections of the spec: one function per rule, one sentence with the key and the values."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, lcm

from meshwright.spec.arithmetic import check_at_most, check_divides, divisors, nearest
from meshwright.spec.base import MAX_RANKS
from meshwright.spec.checkpoint_rules import CHECKPOINT_RULES
from meshwright.spec.cuda_graph_rules import microbatches_are_the_same_work
from meshwright.spec.distil_rules import DISTIL_RULES, other_model_is_drawn
from meshwright.spec.eight_bit import EIGHT_BIT_RULES
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.lora_rules import LORA_RULES
from meshwright.spec.low_precision_rules import LOW_PRECISION_RULES
from meshwright.spec.model import ModelSpec
from meshwright.spec.model_rules import MODEL_RULES
from meshwright.spec.outer_rules import OUTER_RULES, exchanges_are_compared, islands_are_several
from meshwright.spec.parameter_groups import GROUP_RULES
from meshwright.spec.pipeline_schedules import SCHEDULES, virtual_problem
from meshwright.spec.preference_rules import PREFERENCE_RULES, pairs_are_compared
from meshwright.spec.records import show
from meshwright.spec.sections import ROW_KEYS, Sections
from meshwright.spec.stages import even
from meshwright.spec.verification import VerifyOptions
from meshwright.units import counted


def only_experts_are_shared(spec: Sections) -> None:
    """The expert axis, sending in parts, and bounds of what is sent, need experts."""
    for key in ("ep", "etp", "expert_parts"):
        value = getattr(spec.layout, key)
        if spec.model.moe is None and value > 1:
            raise UserError(
                f"layout.{key}: {value} has no effect, as the model has no experts; set layout.{key} = 1, or "
                f"give model.moe"
            )
    factor = spec.layout.expert_buffer_factor
    if spec.model.moe is None and factor is not None:
        raise UserError(
            f"layout.expert_buffer_factor: {factor:g} has no effect, as the model has no experts; set "
            f"layout.expert_buffer_factor = 'none', or give model.moe"
        )


def expert_axis_divides(spec: Sections) -> None:
    """Expert ranks have equal shares, and are folded out of the ranks of one stage."""
    layout, moe = spec.layout, spec.model.moe
    if moe is None:
        return
    ranks, ep, etp = layout.expert_ranks, layout.ep, layout.etp
    folded = f"of dp {layout.dp} x cp {layout.cp} x tp {layout.tp} = {ranks} ranks "
    fits = [n for n in divisors(gcd(ranks, moe.experts)) if ranks % (n * etp) == 0]
    slices = [n for n in divisors(gcd(ranks, moe.ffn)) if ranks % (n * ep) == 0]
    check_divides("layout.ep", ep, "model.moe.experts", moe.experts, fits or [1], folded)
    check_divides("layout.etp", etp, "model.moe.ffn", moe.ffn, slices or [1], folded)
    if moe.expert_bias:
        check_divides("layout.etp", etp, "model.hidden", spec.model.hidden, slices or [1], folded)
    if ranks % (ep * etp):
        key, hint = ("ep", nearest(ep, fits)) if fits else ("etp", nearest(etp, slices or [1]))
        more = lcm(ranks, ep * etp) // (layout.cp * layout.tp)
        raise UserError(
            f"layout.{key}: {getattr(layout, key)} makes ep x etp = {ep * etp}, which does not divide the "
            f"dp {layout.dp} x cp {layout.cp} x tp {layout.tp} = {ranks} ranks of a stage and replica, among "
            f"which experts are shared out; set layout.dp = {more} for more of them, or try layout.{key} = "
            f"{hint}"
        )


def schedule_takes_its_stages(spec: Sections) -> None:
    """A schedule has one stage per rank, two, or any number."""
    layout = spec.layout
    if layout.pp > 1 and (problem := virtual_problem(layout.schedule, layout.chunks)):
        raise UserError(problem)


def stages_hold_every_layer(spec: Sections) -> None:
    """No stage is empty, and a list of stages has a number of blocks for each."""
    layout, layers = spec.layout, spec.model.layers
    count = layout.pp * layout.chunks
    made = f"layout.pp = {layout.pp} x {layout.chunks} stages a rank"
    if count > layers + 2:
        key, fits = "pp", (layers + 2) // layout.chunks
        if SCHEDULES[layout.schedule].stages != 2 and layout.chunks > 1 and layers + 2 >= layout.pp:
            key, fits = "virtual", (layers + 2) // layout.pp
        raise UserError(
            f"layout.{key}: {made} are {count} stages, more than model.layers = {layers} with the embedding "
            f"and the head; try layout.{key} = {max(1, fits)}"
        )
    cut = layout.stages
    if isinstance(cut, str) or (layout.pp > 1 and len(cut) == count and sum(cut) == layers):
        return
    instead = f"try {','.join(map(str, even(layers, count)))}" if layout.pp > 1 else "give layout.pp"
    raise UserError(
        f"layout.stages: {show(list(cut))} is {sum(cut)} blocks in {len(cut)} stages, but {made} take "
        f"model.layers = {layers} blocks in {count} stages; {instead}, or 'even'"
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
    """Tensor ranks have whole heads, equal shares of feed-forward layers, and rows of the vocabulary."""
    if problem := _tensor_problem(spec.model, spec.layout.tp):
        fits = [size for size in divisors(spec.model.heads) if not _tensor_problem(spec.model, size)]
        raise UserError(f"layout.tp: {spec.layout.tp} {problem}; try {nearest(spec.layout.tp, fits)}")


def _tensor_problem(model: ModelSpec, tp: int) -> str:
    """Return the reason why a model cannot be split over `tp` tensor ranks, or an empty string."""
    shares = {
        "heads": model.heads,
        "ffn": model.ffn if has_dense_layers(model) else 0,
        "moe.shared_ffn": model.moe.shared_ffn if model.moe else 0,
    }
    for name, count in shares.items():
        if count % tp:
            return f"does not divide model.{name} = {count}"
    if tp % model.kv_heads and model.kv_heads % tp:
        return f"neither divides model.kv_heads = {model.kv_heads} nor is a multiple of it"
    if not every_rank_has_rows(model.vocab_size, tp):
        return f"leaves the last rank without a row of model.vocab_size = {model.vocab_size}"
    return ""


def has_dense_layers(model: ModelSpec) -> bool:
    """True if some layer has a dense feed-forward layer of `ffn` channels."""
    return not all(map(model.has_experts, range(model.layers)))


def every_rank_has_rows(vocabulary: int, tp: int) -> bool:
    """True if each of `tp` tensor ranks holds a row of a vocabulary split into equal shares."""
    return (tp - 1) * -(-vocabulary // tp) < vocabulary


def sequence_is_cut_evenly(spec: Sections) -> None:
    """Context ranks have two equal pieces of each sequence, and tensor ranks equal shares of these."""
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
    """Ulysses deals the key-value heads of a tensor rank evenly over the context axis."""
    layout, heads = spec.layout, spec.layout.local_kv_heads(spec.model.kv_heads)
    if layout.context_mode == "ulysses" and heads % layout.cp:
        raise UserError(
            f"layout.context_mode: 'ulysses' deals {heads} key-value heads of a tensor rank over layout.cp = "
            f"{layout.cp} ranks, which does not divide them; "
            f"try cp = {nearest(layout.cp, divisors(heads))}, or 'ring', 'gather' or 'ring+ulysses'"
        )


def sharding_has_ranks(spec: Sections) -> None:
    """Hybrid sharding needs a ZeRO stage that shards."""
    layout = spec.layout
    if layout.replicate > 1 and layout.zero == 0 and spec.step_groups == 1 and not spec.staleness:
        raise UserError(
            f"layout.replicate: {layout.replicate} copies of a ZeRO group need layout.zero of 1, 2 or 3; "
            f"for plain replication give layout.dp = {layout.replicate * layout.dp}"
        )


def batch_is_whole(spec: Sections) -> None:
    """Each rank has a whole number of samples and of microbatches of every batch."""
    length, ranks, micro = spec.data.seq_len, spec.layout.data_ranks, spec.layout.micro_batch
    unit = length * ranks
    for stage in spec.train.batch_stages:
        tokens, last = stage.batch_tokens, stage is spec.train.batch_stages[-1]
        key = "train.batch_tokens" if last else "train.batch_warmup"
        what = f"{tokens} is" if last else f"batches of {tokens} tokens are"
        if tokens % unit:
            raise UserError(
                f"{key}: {what} not a multiple of data.seq_len {length} x "
                f"{ranks} data-parallel ranks = {unit}; try {max(unit, round(tokens / unit) * unit)}"
            )
        if micro is not None:
            share = f"{key} / data.seq_len / {ranks} data-parallel ranks"
            check_divides("layout.micro_batch", micro, share, tokens // unit)


def steps_are_within(spec: Sections) -> None:
    """A run ends after its warm-up, and not before `stop_at`."""
    train = spec.train
    if train.epochs is not None:  # not counted yet
        return
    for key in ("stop_at", "warmup_steps"):
        check_at_most(f"train.{key}", getattr(train, key), "the number of steps", train.total_steps)


def warm_up_ends_before_the_decay(spec: Sections) -> None:
    """A warm-up is over before the decay of wsd begins."""
    train, total = spec.train, spec.train.total_steps
    if train.schedule != "wsd" or train.epochs is not None:
        return
    warmup = train.rising_steps
    decay = round(train.decay_fraction * total)
    if warmup + decay > total:
        fits = int(1000 * (total - warmup) / total) / 1000
        raise UserError(
            f"train.decay_fraction: {train.decay_fraction:g} of {counted(total, 'steps')} is a decay of "
            f"{decay}, which overlaps the warm-up of {warmup}; try {fits:g}, or less in train.warmup_steps"
        )


def keys_of_training_have_an_effect(spec: Sections) -> None:
    """Keys of one schedule or optimiser go with it; a default counts as not given."""
    train = spec.train
    idle = (
        ("warmup_fraction", "warmup_steps", train.warmup_steps is not None),
        ("decay", "schedule", train.schedule != "wsd"),
        ("decay_fraction", "schedule", train.schedule != "wsd"),
        ("min_lr_ratio", "schedule", train.schedule == "constant"),
        *((key, "optimiser", True) for key in train.optimiser_kind.unused),
        ("lr_base_batch_tokens", "lr_scaling", train.lr_scaling == "none"),
        ("offload_dir", "offload", train.offload != "disk"),
        ("zclip_alpha", "zclip", train.zclip is None),
        ("zclip_warmup", "zclip", train.zclip is None),
    )
    for key, of, has_none in idle:
        value, default = getattr(train, key), type(train).model_fields[key].default
        if has_none and value != default:
            raise UserError(
                f"train.{key}: {value} has no effect with train.{of} = {getattr(train, of) or 'none'!r}; "
                f"leave it out, or give {'none' if default is None else default}, the default"
            )


def one_corpus_or_a_mixture(spec: Sections) -> None:
    """A mixture replaces the corpus; the default corpus counts as not given."""
    data = spec.data
    if data.mixture and data.corpus != type(data).model_fields["corpus"].default:
        raise UserError(
            f"data.mixture: {', '.join(data.mixture)} with weights is given together with data.corpus = "
            f"{data.corpus!r}; give --data.corpus stdlib, the default, or add it to the mixture with a weight"
        )


def columns_name_keys_of_chats(spec: Sections) -> None:
    """Rows of chats may call the keys of their format otherwise; that of a text is `data.text_key`."""
    for key, column in spec.data.columns.items():
        if key not in ROW_KEYS:
            raise UserError(
                f"data.columns.{key}: no format has such a key{did_you_mean(key, ROW_KEYS)}; give the key of "
                f"the format first, and then its name in the rows: {', '.join(ROW_KEYS)}"
            )
        if not column:
            raise UserError(f"data.columns.{key}: '' names no column; give its name in the rows")
    if spec.data.columns and spec.data.format == "text":
        raise UserError(
            "data.columns: names keys of chats, and data.format = 'text' reads none; give data.text_key for "
            "the key of a text"
        )


def compiled_backwards_are_whole(spec: Sections) -> None:
    """The backward of a compiled block is one program, which also computes the gradients of weights."""
    if spec.train.compile and spec.layout.splits_backward:
        raise UserError(
            f"train.compile: true does not go with layout.schedule = {spec.layout.schedule!r}, which defers "
            f"gradients of weights; try layout.schedule = '1f1b', or train.compile = false"
        )


def world_has_an_end(spec: Sections) -> None:
    """No machine has more than `MAX_RANKS` ranks, and some rules list their divisors."""
    ranks = spec.layout.world_size
    if ranks > MAX_RANKS:
        raise UserError(f"layout: {spec.layout.describe()} is {ranks} ranks; give at most {MAX_RANKS}")


RULES: tuple[Callable[[Sections], None], ...] = (
    world_has_an_end,
    islands_are_several,
    *MODEL_RULES,
    only_experts_are_shared,
    expert_axis_divides,
    schedule_takes_its_stages,
    stages_hold_every_layer,
    tensor_axis_divides,
    experts_have_neighbours,
    sequence_is_cut_evenly,
    ulysses_has_heads,
    sharding_has_ranks,
    batch_is_whole,
    compiled_backwards_are_whole,
    microbatches_are_the_same_work,
    steps_are_within,
    warm_up_ends_before_the_decay,
    keys_of_training_have_an_effect,
    one_corpus_or_a_mixture,
    columns_name_keys_of_chats,
    *CHECKPOINT_RULES,
    *EIGHT_BIT_RULES,
    *LOW_PRECISION_RULES,
    *LORA_RULES,
    *GROUP_RULES,
    *OUTER_RULES,
    *DISTIL_RULES,
    *PREFERENCE_RULES,
)


def check(spec: Sections, ranks: int | None = None) -> None:
    """Apply every rule in order, `ranks_match` first where `ranks` is given; the first broken one raises."""
    if ranks is not None:
        ranks_match(spec, ranks)
    for rule in RULES:
        rule(spec)


def is_accepted(spec: Sections) -> bool:
    """True if no rule refuses a run."""
    try:
        check(spec)
    except UserError:
        return False
    return True


def check_verification(asked: VerifyOptions) -> None:
    """Raise `UserError` for a run, or an option of it, that `meshwright verify` does not compare."""
    for rule in (exchanges_are_compared, other_model_is_drawn, pairs_are_compared):
        rule(asked)


def ranks_match(spec: Sections, ranks: int, flag: str = "--nproc") -> None:
    """As many processes are started, by the number that a `flag` gives, as the layout has ranks."""
    layout = spec.layout
    if ranks == spec.world_size:
        return
    if spec.own_step_group is not None:
        raise UserError(
            f"layout: {layout.describe()} is {counted(spec.world_size, 'ranks')} in a replica, but {ranks} "
            f"were asked for; give {flag} {spec.world_size}"
        )
    axes = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in ("replicate", "dp", "cp", "tp", "pp"))
    raise UserError(
        f"layout: {axes} is {counted(layout.world_size, 'ranks')}, but {ranks} were asked for; "
        f"{near_worlds(spec, ranks, flag)}"
    )


def near_worlds(spec: Sections, ranks: int, flag: str) -> str:
    """Suggest `flag` with the ranks of the layout, or another `layout.dp` that the rules accept."""
    layout, words = spec.layout, f"try {flag} {spec.layout.world_size}"
    others = layout.world_size // layout.dp
    sizes = set(divisors(spec.shared_sequences)) - {layout.dp}
    for dp in sorted(sizes, key=lambda size: (abs(size * others - ranks), -size)):
        try:
            check(spec.model_copy(update={"layout": layout.model_copy(update={"dp": dp})}))
        except UserError:  # try the next, which is further from `ranks`
            continue
        return f"{words} or --layout.dp {dp}" + f" with {flag} {dp * others}" * (dp * others != ranks)
    return words
