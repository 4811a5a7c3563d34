"""Parameter groups and muP under layouts: equal to one device, to the byte, frozen where the factor is 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covering import marked, name
from equality import equal_to_one_device
from meshwright.checkpoint.gather_full import gather_full
from meshwright.comm.mesh import Mesh
from meshwright.dryrun.rank_step import rehearse
from meshwright.planner.memory.states import states
from meshwright.spec import Layout, RunSpec
from meshwright.train.step import Trainer
from meshwright.verify.narrow import narrow
from ranks import Ranks
from small import first_batches, spec_of

MODEL = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32, "train.steps": 3,
    "train.warmup_steps": 1, "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
}  # fmt: skip
GROUPS = {
    "model.mup_base_hidden": 8, "train.lr_factors.embed.*": 0, "train.lr_factors.blocks.1.attn.?.weight": 0.5,
    "train.lr_factors.blocks.1.attn.k.weight": 2.0, "train.lr_factors.*norm.weight": 3.0,
    "train.weight_decays.*.mlp.*": 0.3, "train.weight_decays.blocks.*.attn_norm.weight": 0.2,
}  # fmt: skip
BASE = MODEL | GROUPS
EXPERTS = {
    "model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2,
    "train__lr_factors__*.router.weight": 0.25, "train__lr_factors__blocks.0.mlp.experts.down": 0.5,
}  # fmt: skip
LAYOUTS: list[dict[str, object]] = [
    *({"layout__dp": 4, "layout__zero": zero} for zero in (0, 1, 3)),
    {"layout__tp": 4, "layout__cp": 2, "model__kv_heads": 4},
    {"layout__tp": 4, "layout__dp": 2, "layout__zero": 2, "model__qk_norm": "true"},
    {"layout__pp": 2, "layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__schedule": "zb-h1"},
    {"layout__dp": 4, "layout__zero": 3, **EXPERTS},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__etp": 2, **EXPERTS, "layout__pp": 2},
]
CASES = [{"train__optimiser": kind} | layout for layout in LAYOUTS for kind in ("adamw", "lion", "muon")]
QUICK = [CASES[index] for index in (3, 10)]
CASES += (EIGHT_BIT := [{"train__optimiser": "adamw8bit"} | layout for layout in LAYOUTS])
QUICK.append(EIGHT_BIT[7])
"""Most optimisers, and data, context and expert ranks."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_groups_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(BASE, **case), 1e-9)


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_counts_of_steps_are_planned_to_the_byte(case: dict[str, object]) -> None:
    spec = spec_of(BASE, **case, precision__compute="bf16")
    assert rehearse(spec, 0, torch.device("cpu")).states == states(spec, 0).total


def parameters_after(mesh: Mesh, spec: RunSpec, steps: int) -> dict[str, torch.Tensor]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    for number, batch in enumerate(first_batches(spec, mesh, steps), 1):
        trainer.step(batch, number)
    return gather_full(trainer.states.parameters(), mesh)


FREEZING = [(kind, master) for kind in ("adamw", "adamw8bit", "lion", "muon") for master in ("fp32", "bf16")]
QUICK_FREEZING = [("adamw", "fp32"), ("adamw8bit", "bf16"), ("lion", "bf16"), ("muon", "fp32")]


@pytest.mark.parametrize(
    ("optimiser", "master"),
    [pytest.param(*each, marks=() if each in QUICK_FREEZING else pytest.mark.full) for each in FREEZING],
)
def test_a_factor_of_0_freezes(ranks: Ranks, optimiser: str, master: str) -> None:
    frozen = {"train.lr_factors.embed.*": 0, "train.lr_factors.blocks.0.*": 0}
    spec = spec_of(
        MODEL | frozen, data__corpus="synthetic", train__optimiser=optimiser, precision__compute="bf16",
        precision__master=master, layout__dp=2, layout__zero=1,
    )  # fmt: skip
    before, after = (ranks.run(Layout(dp=2, zero=1), parameters_after, spec, n)[0] for n in (0, 2))
    moved = {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    assert moved and moved == {key for key in before if not key.startswith(("embed.", "blocks.0."))}


def test_a_narrowed_copy_keeps_the_patterns_of_what_is_left(tmp_path: Path) -> None:
    patterns = {"train.lr_factors.blocks.9.*": 0.5, "train.lr_factors.blocks.0.*": 2.0}
    sizes = {
        "model.preset": "small",
        "model.mup_base_hidden": 96,
        "model.layers": 12,
        "data.corpus": "synthetic",
    }
    given = {
        **sizes,
        **patterns,
        "model.hidden": 768,
        "model.ffn": 2048,
        "model.heads": 12,
        "model.kv_heads": 12,
    }
    small, note = narrow(spec_of(given))
    assert note is not None and small.train.lr_factors == {"blocks.0.*": 2.0}
    assert small.model.mup_base_hidden == small.model.hidden // 8
