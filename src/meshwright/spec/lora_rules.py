"""Rules on `[lora]` and what goes with it."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from meshwright.spec.errors import UserError
from meshwright.spec.lora import ALL_LINEAR, BLOCK, adapted, is_adaptable
from meshwright.spec.lora_targets import family_modules
from meshwright.spec.parameters import parameters
from meshwright.spec.sections import Sections


def targets_are_linear(spec: Sections) -> None:
    """Each pattern of `lora.targets` matches a linear layer that can have an adapter."""
    if spec.lora is None:
        return
    every = [parameter for unit in parameters(spec.model).values() for parameter in unit]
    names = [parameter.name for parameter in every if is_adaptable(parameter)]
    for pattern in spec.lora.targets:
        if pattern == ALL_LINEAR or any(fnmatchcase(name, pattern) for name in names):
            continue
        others = [each for each in every if fnmatchcase(each.name, pattern)]
        if others:
            raise UserError(
                f"lora.targets: '{pattern}' matches {others[0].name}, which gets no adapter, since "
                f"it is not the weight of a linear layer in attention or a feed-forward layer; give "
                f"'{ALL_LINEAR}', or names of weights in these"
            )
        near = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))
        modules = ", ".join(family_modules(spec.model))
        raise UserError(
            f"lora.targets: '{pattern}' matches no linear layer; the nearest are {near}, and modules of "
            f"{spec.model.family} are {modules}"
        )


def rank_is_low(spec: Sections) -> None:
    """A and B have fewer rows and columns than the weights that they stand beside."""
    if (lora := spec.lora) is None:
        return
    least = min(adapted(spec.model, lora), key=lambda each: min(each.shape[-2:]))
    if lora.rank > min(least.shape[-2:]):
        raise UserError(
            f"lora.rank: {lora.rank} is more than {min(least.shape[-2:])}, the rank of {least.name} "
            f"{list(least.shape)} itself; try lora.rank = {min(least.shape[-2:])} or less"
        )


def magnitudes_are_of_layers(spec: Sections) -> None:
    """Adapters of routed experts have no magnitudes."""
    if spec.lora is None or not spec.lora.dora:
        return
    if routed := [p for p in adapted(spec.model, spec.lora) if p.expert]:
        raise UserError(
            f"lora.dora: true is not defined for adapters of routed experts, such as that of "
            f"{routed[0].name}, for which PEFT refuses use_dora, too; give lora.dora = false, or "
            f"lora.targets without experts"
        )


def adapters_alone_are_trained(spec: Sections) -> None:
    """Keys that choose trained parameters, or what is trained for, do not go with adapters."""
    if spec.lora is None:
        return
    if spec.train.frozen:
        raise UserError(
            f"train.frozen: {spec.train.frozen[0]!r} has no effect beside [lora], which freezes all but the "
            f"adapters; leave it out, or --lora none"
        )
    if spec.model.mup_base_hidden is not None:
        raise UserError(
            f"model.mup_base_hidden: {spec.model.mup_base_hidden} does not go with [lora], whose rates do "
            f"not follow from the model's width; leave it out"
        )
    if spec.model.mtp_num_layers:
        raise UserError(
            f"model.mtp_num_layers: {spec.model.mtp_num_layers} does not go with [lora], which trains for "
            f"the next token alone; give model.mtp_num_layers = 0"
        )


def adapters_are_not_rounded(spec: Sections) -> None:
    """Products of adapters have no recipe of low precision."""
    if spec.lora is None:
        return
    precision = spec.precision
    if precision.low:
        raise UserError(
            f"precision.compute: {precision.compute!r} rounds the operands of linear layers, which is not "
            f"defined for adapters of [lora]; try precision.compute = 'bf16'"
        )
    if precision.qat is not None:
        raise UserError(
            f"precision.qat: {precision.qat!r} trains weights that are rounded, and [lora] trains none; "
            f"leave one of them out"
        )


def dropout_is_not_compiled(spec: Sections) -> None:
    """Dropout changes with each step, and a compiled block would keep that of its first one."""
    if spec.lora is not None and spec.lora.dropout and spec.train.compile:
        raise UserError(
            f"lora.dropout: {spec.lora.dropout:g} does not go with train.compile = true; give one of "
            f"lora.dropout = 0 and train.compile = false"
        )


def rows_of_the_base_are_whole_blocks(spec: Sections) -> None:
    """Ranks cut a matrix of a quantised base between blocks of inputs that share a scale, or not at all."""
    if spec.lora is None or spec.lora.base_format is None:
        return
    tp = spec.layout.tp
    for parameter in (each for unit in parameters(spec.model).values() for each in unit):
        if not is_adaptable(parameter) or parameter.expert:  # experts stay as they are
            continue
        ranks = tp if parameter.split is not None and parameter.dim == 1 else 1
        whole, inputs = parameter.shape[1], parameter.shape[1] // ranks
        if inputs % BLOCK == 0:
            continue
        fewer = [n for n in range(ranks - 1, 0, -1) if tp % n == 0 and whole // n % BLOCK == 0]
        instead = f"layout.tp = {fewer[0]}, or lora.quantise = 'none'" if fewer else "lora.quantise = 'none'"
        share = f"{whole} / {ranks} ranks = {inputs}" if ranks > 1 else f"{whole}"
        raise UserError(
            f"lora.quantise: {spec.lora.quantise!r} takes matrices with multiples of {BLOCK} inputs on a "
            f"rank, and {parameter.name} has {share} of them; try {instead}"
        )


def a_quantised_base_is_dequantised_in_place(spec: Sections) -> None:
    """Weights come and go outside compiled blocks, and without messages in a pipeline."""
    if spec.lora is None or spec.lora.base_format is None:
        return
    given = f"lora.quantise = {spec.lora.quantise!r}"
    if spec.train.compile:
        raise UserError(
            f"train.compile: true does not go with {given}, whose weights change their place with each "
            f"block; give train.compile = false, or lora.quantise = 'none'"
        )
    if spec.layout.zero == 3 and spec.layout.pp > 1:
        raise UserError(
            f"layout.zero: 3 keeps the weights of all stages whole while a pipeline runs, and so does not go "
            f"with {given}; give layout.zero = 2, whose ranks hold their stages' codes"
        )


LORA_RULES = (
    targets_are_linear,
    rank_is_low,
    magnitudes_are_of_layers,
    adapters_alone_are_trained,
    adapters_are_not_rounded,
    dropout_is_not_compiled,
    rows_of_the_base_are_whole_blocks,
    a_quantised_base_is_dequantised_in_place,
)
