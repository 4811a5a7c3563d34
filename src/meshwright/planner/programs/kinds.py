"""Kinds of rules that several programs have, each made from the data in which these differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.planner.programs.rules import LayoutChoice, Rule, Step
from meshwright.planner.programs.stage_cuts import StageCut
from meshwright.spec.arithmetic import divisors, nearest
from meshwright.spec.layout import ContextMode, Order


def listed(names: Sequence[object], last: str = "or") -> str:
    """Names in words: '1', '1 or 2', '1, 2 or 3'."""
    words = [str(name) for name in names]
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


_STEPS: dict[str, Step] = {"pp": "schedule", "cp": "axes", "tp": "axes"}


def no_axis(key: str, what: str) -> Rule:
    """No ranks on an axis."""
    why, remedy = f"which has no {what}", f"give layout.{key} = 1"
    return Rule(_STEPS[key], key, lambda at: getattr(at, key) > 1, why, remedy)


def schedules(names: Sequence[str]) -> Rule:
    """Pipelines have one of some schedules."""
    return Rule(
        "schedule",
        "schedule",
        lambda at: at.pp > 1 and at.schedule not in names,
        f"whose pipelines are {listed(names)}",
        f"give layout.schedule = {listed(names)}",
    )


def stages_as_cut(
    cut: StageCut, words: str, none: str = "{pp} x {virtual} of them cannot hold {model.layers} layers so"
) -> tuple[Rule, Rule]:
    """Stages hold the blocks that the program deals them, which `words` say after 'whose stages'.

    `none` says what is wrong with numbers of stages that have no cut.
    """

    def remedy(at: LayoutChoice) -> str:
        layers = at.model.layers
        fits = [size for size in divisors(layers) if size > 1 and cut(at.model, size * at.virtual)]
        others = [count for count in range(1, layers // at.pp + 1) if cut(at.model, at.pp * count)]
        ways = [f"layout.pp = {nearest(at.pp, fits)}"] if fits else []
        ways += [f"layout.virtual = {nearest(at.virtual, others)}"] if others else []
        return f"give {listed(ways or ['layout.pp = 1'])}"

    return (
        Rule(
            "schedule",
            "pp",
            lambda at: at.pp > 1 and cut(at.model, at.pp * at.virtual) is None,
            f"whose stages {words}, and {none}",
            remedy,
        ),
        Rule(
            "stages",
            "stages",
            lambda at: at.pp > 1 and at.stages != (cut(at.model, at.pp * at.virtual) or at.stages),
            f"whose stages {words}",
            lambda at: (
                f"give layout.stages = {','.join(map(str, cut(at.model, at.pp * at.virtual) or ()))}, or "
                f"leave it out"
            ),
        ),
    )


def whole_kv_heads() -> Rule:
    """Tensor ranks have whole key-value heads, none of them twice."""
    return Rule(
        "axes",
        "tp",
        lambda at: at.model.kv_heads % at.tp > 0,
        "which deals whole key-value heads to tensor ranks, and model.kv_heads is {model.kv_heads}",
        lambda at: f"give layout.tp = {nearest(at.tp, divisors(at.model.kv_heads))}",
    )


def context_modes(modes: Sequence[ContextMode], how: str) -> Rule:
    """Context ranks attend in one of some ways."""
    return Rule(
        "axes",
        "context_mode",
        lambda at: at.cp > 1 and at.context_mode not in modes,
        f"whose context parallelism is {how}",
        f"give layout.context_mode = {listed(modes)}",
    )


def tokens_in_parts() -> Rule:
    """Sequences are cut into two pieces of each context rank for each tensor rank."""
    return Rule(
        "axes",
        "tp",
        lambda at: at.tp * at.cp > 1 and at.length % (2 * at.tp * at.cp) > 0,
        "which cuts sequences into 2 x layout.cp x layout.tp equal parts, and {length} tokens are not",
        lambda at: f"give data.seq_len = {-(-at.length // (2 * at.tp * at.cp)) * 2 * at.tp * at.cp}",
    )


def sharded_tokens_with_experts() -> Rule:
    """Tensor ranks shard tokens between their regions where there are experts."""
    return Rule(
        "axes",
        "sequence_parallel",
        lambda at: at.model.moe is not None and at.tp > 1 and not at.sequence_parallel,
        "whose experts take the tokens that tensor ranks share",
        "give layout.sequence_parallel = true",
    )


def no_sharded_tokens(since: str) -> Rule:
    """Tensor ranks all have whole hidden states."""
    return Rule(
        "axes",
        "sequence_parallel",
        lambda at: at.tp > 1 and at.sequence_parallel,
        f"which has no sequence parallelism ({since})",
        "give layout.sequence_parallel = false",
    )


def no_experts() -> Rule:
    """No layers with experts."""
    return Rule(
        "axes",
        "model.moe",
        lambda at: at.model.moe is not None,
        "which has no layers with experts",
        "give --stack megatron-core, or a dense model",
    )


def slices_of_experts(takes: Callable[[LayoutChoice], Sequence[int]], how: str) -> Rule:
    """Ranks that share an expert are some numbers of them."""
    return Rule(
        "mesh",
        "etp",
        lambda at: at.model.moe is not None and at.etp not in takes(at),
        f"which cuts each expert {how}",
        lambda at: f"give layout.etp = {listed(sorted(set(takes(at))))}",
    )


def orders(names: Sequence[Order], how: str) -> Rule:
    """Axes are numbered in some orders."""
    return Rule(
        "mesh",
        "order",
        lambda at: at.pp > 1 and at.order not in names,
        f"which numbers {how}",
        f"give layout.order = {listed(names)}",
    )


def zero_stages(takes: Callable[[LayoutChoice], Sequence[int]], how: str, instead: str = "") -> Rule:
    """States are sharded in some stages of ZeRO; of a rank that is alone stage 0 is as good as any."""
    return Rule(
        "sharding",
        "zero",
        lambda at: at.zero not in takes(at) and (at.shards or at.zero > 0),
        how,
        lambda at: f"give layout.zero = {listed(takes(at))}{instead}",
    )


def one_copy() -> Rule:
    """States are sharded over all data ranks or none of them."""
    return Rule(
        "sharding",
        "replicate",
        lambda at: at.replicate > 1,
        "which shards states over all data ranks (no hybrid sharding)",
        "give layout.replicate = 1, and layout.dp = {replicate} times as much",
    )


def rounds_of_microbatches(names: Sequence[str]) -> Rule:
    """Some schedules take microbatches in multiples of the pipeline's ranks."""
    return Rule(
        "microbatches",
        "schedule",
        lambda at: at.pp > 1 and at.schedule in names and at.microbatches % at.pp > 0,
        "which takes its microbatches in multiples of layout.pp = {pp}, and a rank has {microbatches}",
        "give a layout.micro_batch or layout.pp by which they are such a multiple",
    )


def enough_microbatches(names: Sequence[str], least: Callable[[LayoutChoice], int], how: str) -> Rule:
    """Some schedules take some number of microbatches at least; `how` says which after 'at least'."""
    return Rule(
        "microbatches",
        "schedule",
        lambda at: at.pp > 1 and at.schedule in names and at.microbatches < least(at),
        f"which takes at least {how}, and a rank has {{microbatches}} for {{pp}} pipeline ranks",
        lambda at: f"give a smaller layout.micro_batch or layout.pp, so that a rank has {least(at)}",
    )
