"""Rules of islands and of late gradients: what they need, and what is kept for all ranks of a run alike."""

from __future__ import annotations

from meshwright.spec.arithmetic import check_at_most
from meshwright.spec.eight_bit import check_whole_blocks
from meshwright.spec.errors import UserError
from meshwright.spec.precision import DELAYED
from meshwright.spec.sections import Sections
from meshwright.spec.verification import VerifyOptions


def islands_are_several(spec: Sections) -> None:
    """Islands are the groups of `layout.replicate`; keys of their exchange have no effect without it."""
    outer = spec.outer
    if outer.every and spec.layout.replicate == 1:
        raise UserError(
            f"outer.every: {outer.every} steps between exchanges need islands to exchange between, and "
            f"layout.replicate is 1; give layout.replicate = 2 or more"
        )
    if outer.every:
        return
    given = [
        key
        for key, field in type(outer).model_fields.items()
        if getattr(outer, key) != field.default and key not in ("staleness", "staleness_lr")
    ]
    if given:
        raise UserError(
            f"outer.{given[0]}: {getattr(outer, given[0])} has no effect with outer.every = 0; give a number "
            f"of steps between exchanges, such as outer.every = 50, or take back all keys of islands: "
            f"{' '.join(f'--outer.{key} none' for key in given)}"
        )


def fragments_fit_the_period(spec: Sections) -> None:
    """Each fragment has a block and a step of its own, and its exchange ends before its next one."""
    outer = spec.outer
    if outer.every:
        check_at_most("outer.fragments", outer.fragments, "model.layers", spec.model.layers)
        check_at_most("outer.fragments", outer.fragments, "outer.every", outer.every)
    if outer.every and outer.delay >= outer.every:
        raise UserError(
            f"outer.delay: {outer.delay} steps are not over when the same parameters are exchanged again, "
            f"after outer.every = {outer.every}; give at most {outer.every - 1}"
        )


def errors_are_of_a_compression(spec: Sections) -> None:
    """Error feedback sends later what a compressed exchange did not send."""
    outer = spec.outer
    if outer.error_decay is not None and not outer.compressed:
        raise UserError(
            f"outer.error_decay: {outer.error_decay} has no effect with outer.format = 'fp32', which sends "
            f"everything; give outer.top_k = 0.03, or outer.format = 'int4'"
        )


def slices_of_experts_are_whole_blocks(spec: Sections) -> None:
    """Ranks cut the rows of experts between the blocks of what islands exchange."""
    outer = spec.outer
    if outer.top_k is not None:
        check_whole_blocks(spec, f"outer.top_k = {outer.top_k}", "outer.top_k = 'none'")
    elif outer.has_blocks:
        check_whole_blocks(spec, f"outer.format = {outer.format!r}", "outer.format = 'bf16'")


def islands_by_quorum_exchange_all(spec: Sections) -> None:
    """Islands that need not come to an exchange are fewer than all, and exchange the whole model at once."""
    outer, count = spec.outer, spec.layout.replicate
    if not outer.every:
        return
    if outer.quorum is None:
        for key in ("grace_seconds", "max_staleness", "island"):
            value, default = getattr(outer, key), type(outer).model_fields[key].default
            if value != default:
                raise UserError(
                    f"outer.{key}: {value!r} has no effect where all islands exchange together; give "
                    f"outer.quorum, the islands that are enough for an exchange"
                )
        return
    check_at_most("outer.quorum", outer.quorum, "the islands of layout.replicate", count)
    if outer.island is not None:
        check_at_most("outer.island", outer.island, "the last island, layout.replicate - 1", count - 1)
    whole = {"fragments": 1, "delay": 0, "alpha": None, "format": "fp32", "top_k": None}
    for key, only in whole.items():
        if getattr(outer, key) != only:
            raise UserError(
                f"outer.{key}: {getattr(outer, key)} does not go with outer.quorum = {outer.quorum}, with "
                f"which the whole model is exchanged at once in exact numbers; give "
                f"{only if only is not None else 'none'}, or leave outer.quorum out"
            )


def islands_keep_states_of_their_own(spec: Sections) -> None:
    """A checkpoint has the parameters and moments of each island, and other states once for all ranks."""
    if not spec.outer.every:
        return
    train, precision = spec.train, spec.precision
    kept_once = (
        ("precision.compute", precision.compute, precision.compute in ("fp16", *DELAYED), "'bf16'"),
        ("precision.master", precision.master, precision.master == "bf16", "'fp32'"),
        ("train.ema", train.ema, train.ema is not None, "'none'"),
        ("train.zclip", train.zclip, train.zclip is not None, "'none'"),
        ("recovery.on_spike", spec.recovery.on_spike, spec.recovery.on_spike != "ignore", "'ignore'"),
    )
    for key, value, broken, other in kept_once:
        if broken:
            raise UserError(
                f"{key}: {value!r} does not go with islands (outer.every = {spec.outer.every}), each of "
                f"which would need a state of its own for it; give {other}"
            )


def islands_have_no_other_models(spec: Sections) -> None:
    """Another model is on all ranks of a run, which islands' ranks step without waiting for."""
    for table, model in spec.tables_of_models.items():
        if spec.outer.every:
            raise UserError(
                f"{table}: {model} is on all ranks of a run, and islands (outer.every = {spec.outer.every}) "
                f"do not wait for each other; give outer.every = 0 or --{table} none"
            )


def exchanges_know_the_last_step(spec: Sections) -> None:
    """The steps of a run whose replicas exchange late or seldom are known before its corpus is opened."""
    outer = spec.outer
    if spec.train.epochs is not None and (outer.every or outer.staleness):
        given = f"outer.every = {outer.every}" if outer.every else f"outer.staleness = {outer.staleness}"
        raise UserError(
            f"train.epochs: {spec.train.epochs:g} are counted when the corpus is opened, and {given} needs "
            "the steps before; give train.steps"
        )


def late_gradients_are_of_each_step(spec: Sections) -> None:
    """Gradients are late where replicas sum them in each step, and some arrive before the run ends."""
    outer, last = spec.outer, spec.train.total_steps
    if outer.staleness_lr != "none" and not outer.staleness and outer.quorum is None:
        late = "outer.quorum" if outer.every else "outer.staleness = 1 or more"
        raise UserError(
            f"outer.staleness_lr: {outer.staleness_lr!r} has no effect where nothing comes late; give "
            f"'none', or {late}"
        )
    if not outer.staleness:
        return
    if outer.every:
        raise UserError(
            f"outer.staleness: {outer.staleness} puts off gradients that replicas sum in each step, and "
            f"islands (outer.every = {outer.every}) sum none; give one of the two as 0"
        )
    if outer.staleness >= last:
        raise UserError(
            f"outer.staleness: {outer.staleness} steps are not over in a run of {last}, which would update "
            f"nothing; give at most {last - 1}, or more train.steps"
        )


def replicas_of_late_gradients_are_whole(spec: Sections) -> None:
    """Without ZeRO the ranks of a replica would have nothing to sum gradients over at once."""
    layout, moe = spec.layout, spec.model.moe
    ranks = layout.shard_ranks if moe is None else max(layout.shard_ranks, layout.expert_data_ranks)
    if spec.outer.staleness and layout.replicate > 1 and layout.zero == 0 and ranks > 1:
        raise UserError(
            f"layout.zero: 0 with outer.staleness = {spec.outer.staleness} needs replicas that hold each "
            f"parameter once, and {ranks} ranks of each replica (layout.replicate = {layout.replicate}) hold "
            f"the same; give layout.zero = 1"
        )


def late_gradients_are_judged_late(spec: Sections) -> None:
    """Where a gradient is applied late its step's loss scale, history and batch are no longer at hand."""
    if not spec.outer.staleness:
        return
    compute, spike = spec.precision.compute, spec.recovery.on_spike
    scaled = compute in ("fp16", *DELAYED)
    at_hand = (
        ("precision.compute", compute, scaled, "scales that follow each gradient", "bf16"),
        ("recovery.on_spike", spike, spike == "rollback", "the batch of a gradient, to leave it out", "stop"),
    )
    for key, value, broken, needs, other in at_hand:
        if broken:
            raise UserError(
                f"{key}: {value!r} needs {needs}, which is applied outer.staleness = {spec.outer.staleness} "
                f"steps later; give {other!r}, or outer.staleness = 0"
            )


def exchanges_are_compared(asked: VerifyOptions) -> None:
    """`verify` compares exchanges and late gradients in float64, in one world, and in no sweep of layouts."""
    spec, outer, onto = asked.spec, asked.spec.outer, asked.onto
    if asked.sweep and outer.every:
        raise UserError(
            f"outer.every: {outer.every}: a sweep compares layouts that sum gradients; give outer.every = 0, "
            f"and verify islands without --sweep"
        )
    if outer.island is not None:
        raise UserError(
            f"outer.island: {outer.island}: `verify` compares all islands, in the order of a script; leave "
            f"it out"
        )
    for key, value in (("every", outer.every), ("staleness", outer.staleness)):
        if value and asked.precision == "run":
            raise UserError(
                f"outer.{key}: {value}: islands and late gradients are compared in float64; remove "
                f"--precision, or give outer.{key} = 0"
            )
    if asked.through is not None and outer.quorum is not None:
        raise UserError(
            f"outer.quorum: {outer.quorum}: islands that come when they can have a checkpoint each; remove "
            f"--through, or outer.quorum"
        )
    if onto is not None and onto.step_groups != spec.step_groups:
        raise UserError(
            f"--onto: has {onto.step_groups} islands, and the run has {spec.step_groups}, which its "
            f"reference keeps; give replicate={spec.layout.replicate}"
        )


def late_gradients_are_exact(spec: Sections) -> None:
    """Gradients that are put off are on their way before a step is known to be computed again."""
    if spec.outer.staleness and (factor := spec.layout.expert_buffer_factor) is not None:
        raise UserError(
            f"layout.expert_buffer_factor: {factor:g} may have a step computed again, when outer.staleness = "
            f"{spec.outer.staleness} has sent its gradients already; give one of the two as none"
        )


OUTER_RULES = (
    fragments_fit_the_period,
    errors_are_of_a_compression,
    slices_of_experts_are_whole_blocks,
    islands_by_quorum_exchange_all,
    islands_keep_states_of_their_own,
    islands_have_no_other_models,
    exchanges_know_the_last_step,
    late_gradients_are_of_each_step,
    replicas_of_late_gradients_are_whole,
    late_gradients_are_judged_late,
    late_gradients_are_exact,
)
