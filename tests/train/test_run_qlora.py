"""Whole runs with a quantised base: what is stored, resume on other layouts, and what reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from covering import some
from meshwright import api
from meshwright.comm.mesh import Mesh
from meshwright.model.blockwise_quantisation import rounded_to_blocks
from meshwright.spec import RunSpec, load
from meshwright.spec.lora import is_adaptable, is_adapter
from meshwright.spec.parameters import parameters
from meshwright.train.step import Trainer
from meshwright.weights.load import load_run
from meshwright.weights.saved_weights import SavedWeights
from ranks import Ranks
from training_runs import HALF, STEPS, spec_of, start

WIDE = {"model__hidden": 64, "model__ffn": 128, "model__heads": 4, "model__head_dim": 32}
QLORA = WIDE | {"lora__rank": 4, "lora__alpha": 16.0, "lora__quantise": "nf4", "precision__compute": "bf16"}
LAYOUTS: list[dict[str, object]] = [
    {"layout__dp": 2, "layout__zero": 3},
    {"layout__tp": 2, "lora__quantise": "int4", "train__ema": 0.9},
    {"layout__pp": 2, "lora__quantise": "int8", "precision__master": "bf16", "lora__dropout": 0.2},
]


def quantised_names(spec: RunSpec) -> set[str]:
    return {p.name for unit in parameters(spec.model).values() for p in unit if is_adaptable(p)}


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[1:2]), ids=str)
def test_stop_and_resume_are_bitwise_equal(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    flags = QLORA | layout
    whole, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "whole")
    half, _ = start(ranks, spec_of(corpus, **flags, train__stop_at=HALF), tmp_path / "halves")
    both, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "halves", "auto")
    assert half["steps"] == HALF and both["steps"] == STEPS
    assert both["parameters_sha256"] == whole["parameters_sha256"] != half["parameters_sha256"]
    assert both["final_loss"] == whole["final_loss"] < half["final_loss"]


def test_a_resume_on_another_layout_goes_on_from_the_same_base(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    exact = QLORA | {"precision__compute": "fp64"}
    before = spec_of(corpus, **exact, layout__dp=2, layout__zero=3, train__stop_at=HALF)
    start(ranks, before, tmp_path)
    both, found = start(ranks, spec_of(corpus, **exact, layout__tp=2), tmp_path, "auto")
    alone, wanted = start(ranks, spec_of(corpus, **exact), tmp_path / "alone")
    assert both["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-12)
    for name in wanted:
        if is_adapter(name):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-13)
        else:
            assert torch.equal(found[name], wanted[name]), name


def test_readers_merge_onto_the_values_of_codes(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **QLORA, layout__tp=2)
    _, tensors = start(ranks, spec, tmp_path)
    (tmp_path / "run.json").write_text(f'{{"spec": {spec.model_dump_json()}}}')
    read, saved = dict(load_run(tmp_path).named_parameters()), SavedWeights(tmp_path)
    (apart,) = (tmp_path / "checkpoints").glob("frozen-*")
    base = sum(tensor.numel() for name, tensor in tensors.items() if not is_adapter(name))
    assert sum(file.stat().st_size for file in apart.glob("*.bin")) == 2 * base
    for name in quantised_names(spec):
        assert torch.equal(rounded_to_blocks(tensors[name], "nf4"), tensors[name])
        stem = name.removesuffix("weight")
        a, b = tensors[f"{stem}lora_a.weight"], tensors[f"{stem}lora_b.weight"]
        wanted = tensors[name].float() + 4 * b @ a
        assert torch.allclose(read[name], wanted, rtol=0, atol=1e-6)
        assert torch.equal(saved.read(name).float(), read[name])
    with pytest.warns(UserWarning, match=r"trained beside weights in nf4; on weights that are not"):
        api.export(tmp_path, tmp_path / "adapter", adapter=True)


def test_another_format_is_refused_at_a_resume(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    start(ranks, spec_of(corpus, **QLORA, train__stop_at=HALF), tmp_path)
    other = spec_of(corpus, **QLORA | {"lora__quantise": "int4"})
    with pytest.raises(Exception, match=r"lora\.quantise was 'nf4' and is 'int4'"):
        start(ranks, other, tmp_path, "auto")


def stored(mesh: Mesh, spec: RunSpec, folder: Path) -> dict[str, Tensor]:
    """The parameters of a run that starts from a folder, whole, and checks what a rank has in memory."""
    from meshwright.weights.initial_weights import open_weights

    trainer = Trainer(spec, mesh)
    trainer.initialise(open_weights(spec))
    for unit in trainer.states.units:
        if unit.quantised is not None:
            assert unit.stored.nbytes == unit.part // 2 + unit.part // 64 * 2
            assert unit.full.untyped_storage().nbytes() == 0
    return {name: tensor.full_tensor().clone() for name, tensor in trainer.states.parameters()}


@pytest.mark.parametrize(
    "axes", some([{"dp": 1}, {"dp": 3, "zero": 3}, {"pp": 2}], [{"dp": 3, "zero": 3}]), ids=str
)
def test_the_base_of_a_folder_is_its_rounded_weights(
    ranks: Ranks, tmp_path: Path, axes: dict[str, int]
) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, head_dim=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    given = {
        "model.hf": tmp_path / "hf",
        "model.weights": tmp_path / "hf",
        "data.seq_len": 16,
        "train.batch_tokens": 96,
    }
    given |= {"lora.rank": 4, "lora.quantise": "nf4", "precision.compute": "bf16"}
    given |= {f"layout.{axis}": size for axis, size in axes.items()}
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    found: dict[str, Tensor] = {}
    for part in ranks.run(spec.layout, stored, spec, tmp_path / "hf"):
        found |= part
    whole = load(None, [(key, str(value)) for key, value in given.items() if key != "lora.quantise"])
    plain: dict[str, Tensor] = {}
    for part in ranks.run(whole.layout, stored, whole, tmp_path / "hf"):
        plain |= part
    names = quantised_names(spec)
    assert len(names) == 14
    for name, weight in plain.items():
        assert torch.equal(found[name], rounded_to_blocks(weight, "nf4") if name in names else weight), name
