"""Rates and decays of single parameters, by patterns and by muP."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from meshwright.exchange.hf_config import write_hf_config
from meshwright.model.init import init_value
from meshwright.spec import RunSpec, UserError
from meshwright.spec.parameter_groups import Group, frozen_names, group_of, run_parameters
from meshwright.spec.stages import first_trained
from meshwright.spec.training_flops import flops_per_token
from meshwright.verify.reference.groups import factor_and_decay, is_frozen


def spec_of(train: dict[str, Any], model: dict[str, Any] | None = None) -> RunSpec:
    return RunSpec.model_validate({"model": {"preset": "moe-tiny"} | (model or {}), "train": train})


def test_the_most_specific_pattern_holds_in_any_order() -> None:
    patterns = {"*": 2.0, "blocks.*": 3.0, "blocks.1.*": 4.0, "*.mlp.router.weight": 5.0}
    wanted = {
        "embed.weight": 2.0, "blocks.0.attn_norm.weight": 3.0, "blocks.1.attn.q.weight": 4.0,
        "blocks.1.mlp.router.weight": 5.0,
    }  # fmt: skip
    for listed in itertools.permutations(patterns.items()):
        spec = spec_of({"lr_factors": dict(listed), "weight_decays": {"blocks.?.attn_norm.*": 0.25}})
        assert {name: group_of(spec, name, 2).factor for name in wanted} == wanted
    assert group_of(spec, "blocks.0.attn_norm.weight", 1) == Group(3.0, 0.25)
    assert group_of(spec, "blocks.0.mlp_norm.weight", 1) == Group(3.0, 0.0)
    assert group_of(spec, "embed.weight", 2) == Group(2.0, 0.1)


def test_a_set_of_characters_is_less_specific_than_one_of_them() -> None:
    spec = spec_of({"lr_factors": {"blocks.[0-3].*": 2.0, "blocks.1.*": 3.0}})
    for name, factor in (("blocks.0.attn.q.weight", 2.0), ("blocks.1.attn.q.weight", 3.0)):
        assert group_of(spec, name, 2).factor == factor == factor_and_decay(spec, name, 2)[0]


def test_the_reference_reads_sets_of_characters_likewise() -> None:
    spec = spec_of({"frozen": ["blocks.[!01].*", "embed.[vw]eight"]})
    every = [parameter.name for unit in run_parameters(spec).values() for parameter in unit]
    frozen = {name for name in every if is_frozen(spec, name)}
    assert frozen == frozen_names(spec) != set()
    assert "embed.weight" in frozen and "blocks.1.attn.q.weight" not in frozen


def test_without_patterns_matrices_are_decayed_at_the_rate_of_the_run() -> None:
    assert group_of(spec_of({}), "embed.weight", 2) == Group(1.0, 0.1)
    assert group_of(spec_of({}), "blocks.0.mlp.experts.down", 3) == Group(1.0, 0.1)
    assert group_of(spec_of({}), "head.norm.weight", 1) == Group(1.0, 0.0)


@pytest.mark.parametrize(("optimiser", "hidden"), [("adamw", 1 / 4), ("lion", 1 / 4), ("muon", 1 / 2)])
def test_mup_is_table_3(optimiser: str, hidden: float) -> None:
    """A model four times as wide as its base; rates x decay are those of the base."""
    plain = spec_of({"optimiser": optimiser})
    factors = {"blocks.0.attn.q.weight": 3.0}
    spec = spec_of(
        {"optimiser": optimiser, "lr_factors": factors},
        {"mup_base_hidden": plain.model.hidden // 4},
    )
    wanted = {
        "embed.weight": (2, 1.0, 1.0), "head.norm.weight": (1, 1.0, 1.0), "head.weight": (2, 1 / 4, 1 / 4),
        "blocks.0.mlp.router.weight": (2, 1 / 4, 1 / 4), "blocks.0.attn.o.weight": (2, hidden, 1 / 2),
        "blocks.0.mlp.experts.down": (3, hidden, 1 / 2), "blocks.0.attn.q.weight": (2, 3 * hidden, 1 / 2),
    }  # fmt: skip
    for name, (dims, factor, std) in wanted.items():
        group = group_of(spec, name, dims)
        assert group.factor == factor, name
        assert group.factor * group.decay == pytest.approx(factors.get(name, 1) * (0.1 if dims > 1 else 0))
        assert init_value(spec.model, name).std == pytest.approx(std * init_value(plain.model, name).std), (
            name
        )


def test_a_model_of_the_bases_width_is_the_base() -> None:
    plain = spec_of({})
    base = spec_of({}, {"mup_base_hidden": plain.model.hidden})
    for name, dims in (("embed.weight", 2), ("head.weight", 2), ("blocks.0.attn.q.weight", 2)):
        assert group_of(base, name, dims) == group_of(plain, name, dims)
        assert init_value(base.model, name) == init_value(plain.model, name)


def test_mup_is_not_in_what_is_exported() -> None:
    """It has no factors in the forward."""
    plain, mup = (
        RunSpec.model_validate({"model": {"preset": "tiny", "mup_base_hidden": base}}) for base in (None, 64)
    )
    assert write_hf_config(mup.model, "float32") == write_hf_config(plain.model, "float32")


@pytest.mark.parametrize(
    ("frozen", "told"),
    [
        (["embed.*", "blocks.9.*"], "train.frozen: 'blocks.9.*' matches no parameter of the model"),
        (["*"], "train.frozen: no parameter is left to train beside those of '*'; leave some out"),
    ],
)
def test_a_set_of_frozen_parameters_that_makes_no_sense_is_refused(frozen: list[str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        spec_of({"frozen": frozen})


@pytest.mark.parametrize("key", ["lr_factors", "weight_decays"])
def test_a_rate_of_frozen_parameters_alone_is_refused(key: str) -> None:
    told = f"train.{key}.embed.*: every parameter that it matches is frozen by train.frozen"
    with pytest.raises(UserError, match=re.escape(told)):
        spec_of({"frozen": ["embed.*"], key: {"embed.*": 0.5}})
    spec_of({"frozen": ["embed.*"], key: {"*.weight": 0.5}})


def test_frozen_parameters_are_those_of_the_patterns() -> None:
    spec = spec_of({"frozen": ["embed.*", "blocks.?.attn.*"]})
    every = [parameter for unit in run_parameters(spec).values() for parameter in unit]
    assert {p.name for p in every if not p.trainable} == frozen_names(spec)
    assert all(p.trainable != (p.name.startswith("embed.") or ".attn." in p.name) for p in every)
    assert first_trained(spec) == 1
    assert first_trained(spec_of({"frozen": ["embed.*", "blocks.*"]})) == spec.model.layers + 1


def test_flops_of_frozen_parameters_are_those_of_the_forward() -> None:
    plain, head = spec_of({}), spec_of({"frozen": ["embed.*", "blocks.*"]})
    model, length = plain.model, plain.data.seq_len
    assert flops_per_token(plain) == model.flops_per_token(length)
    assert flops_per_token(head) == model.forward_flops(length) + 2 * model.head_flops
    matrices = spec_of({"frozen": ["blocks.*.attn.?.weight", "blocks.*.mlp.*", "head.weight"]})
    weights = sum(map(model.block_weight_flops, model.layer_kinds)) + model.head_flops
    assert flops_per_token(matrices) == model.flops_per_token(length) - weights
