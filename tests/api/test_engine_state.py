"""Weights of engines go to other programs and back, states to disk and to the host's memory, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_cases import LAYOUTS, own_rows, spec_of, whole_batch
from hf_models import CASES, save_theirs
from meshwright import api
from meshwright.api.engine import Engine
from meshwright.api.engine_callbacks import EngineCallback
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import load
from ranks import Ranks

MOVED = ["one process", "dp2 zero3", "tp2", "pp2 1f1b", "pp2 dualpipe-v", "tp2 dp2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """HF folders of models in float64 by their cases."""
    made = tmp_path_factory.mktemp("models")
    for case in ("llama", "llama tied", "qwen3_moe"):
        save_theirs(made / case / "float32", *CASES[case]).double().save_pretrained(made / case)
    return {case: made / case for case in ("llama", "llama tied", "qwen3_moe")}


def of_files(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def assert_same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each), name


# Weights in memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", MOVED)
def test_weights_go_round_to_the_bit(ranks: Ranks, folders: dict[str, Path], layout: str) -> None:
    """Out of files into every rank's iterator, and out of an iterator into other weights."""
    wanted = of_files(folders["llama"])
    spec = spec_of(folders["llama"], LAYOUTS[layout])
    for own, again in ranks.run(spec.layout, states_of, spec, wanted):
        assert_same_tensors(own, wanted)
        assert_same_tensors(again, wanted)


def states_of(mesh: Mesh, spec: RunSpec, wanted: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    random = spec.model.model_copy(update={"weights": "random"})
    with Engine(spec, mesh=mesh) as engine:
        own = dict(engine.hf_state())
    with Engine(spec.model_copy(update={"model": random}), mesh=mesh) as engine:
        before = dict(engine.hf_state())
        assert not torch.equal(before["lm_head.weight"], wanted["lm_head.weight"])
        engine.load_hf_state(reversed(list(wanted.items())))
        rows = own_rows(whole_batch(), engine.data_rank, engine.data_ranks)
        whole = engine.decoder()
        with torch.no_grad():
            logs = whole(rows["input_ids"][1:2]).log_softmax(-1)
        found = engine.log_probs({"input_ids": rows["input_ids"][1:2]})
        assert isinstance(found, Tensor)
        there = logs[:, :-1].gather(2, rows["input_ids"][1:2, 1:, None]).squeeze(2)
        torch.testing.assert_close(found[:, 1:], there, rtol=0, atol=1e-9)
        return [own, dict(engine.hf_state())]


@pytest.mark.parametrize("layout", ["one process", "tp2"])
@pytest.mark.parametrize("case", ["llama tied", "qwen3_moe"])
def test_an_export_is_the_state_after_steps(
    ranks: Ranks, folders: dict[str, Path], tmp_path: Path, case: str, layout: str
) -> None:
    spec = spec_of(folders[case], LAYOUTS[layout])
    found = ranks.run(spec.layout, trained_state, spec, tmp_path / "run")
    with warnings.catch_warnings(action="ignore"):  # the model has no tokenizer
        api.export(tmp_path / "run", tmp_path / "hf")
    for each in found:
        assert_same_tensors(each, of_files(tmp_path / "hf"))


def trained_state(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Tensor]:
    with Engine(spec, mesh=mesh) as engine:
        whole = whole_batch(length=12)
        engine.forward_backward(own_rows(whole, engine.data_rank, engine.data_ranks))
        engine.step()
        engine.save(out)
        return dict(engine.hf_state())


def test_stacked_experts_are_taken_too(folders: dict[str, Path]) -> None:
    """As transformers 5 has them in memory: one tensor of all."""
    wanted = of_files(folders["qwen3_moe"])
    stacked = {name: each for name, each in wanted.items() if ".experts." not in name}
    for layer in range(3):
        of = f"model.layers.{layer}.mlp.experts"
        parts = {
            x: torch.stack([wanted[f"{of}.{expert}.{x}_proj.weight"] for expert in range(6)])
            for x in ("gate", "up", "down")
        }
        stacked[f"{of}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        stacked[f"{of}.down_proj"] = parts["down"]
    spec = spec_of(folders["qwen3_moe"], {}, model__weights="random")
    with Engine(spec) as engine:
        engine.load_hf_state(stacked.items())
        assert_same_tensors(dict(engine.hf_state()), wanted)


def test_tensors_that_do_not_fit_are_told(folders: dict[str, Path]) -> None:
    wanted = of_files(folders["llama"])
    name = "model.layers.1.mlp.up_proj.weight"
    wrong: dict[str, list[tuple[str, Tensor]]] = {
        f"lacks the tensor {name}": [pair for pair in wanted.items() if pair[0] != name],
        "other is no tensor of this model": [*wanted.items(), ("other", torch.zeros(1))],
        "was given twice": [*wanted.items(), (name, wanted[name])],
        r"has shape \[64, 96\], but this model has \[96, 64\]": [(name, wanted[name].T)],
        "not finite": [(name, wanted[name] * torch.inf)],
    }
    with Engine(spec_of(folders["llama"], {})) as engine:
        for message, tensors in wrong.items():
            with pytest.raises(UserError, match=message):
                engine.load_hf_state(tensors)


# Checkpoints --------------------------------------------------------------------------------------------


class Calls(EngineCallback):
    """Notes the calls of an engine."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step_begin(self, engine: Any) -> None:
        self.names.append(f"begin {engine.steps}")

    def on_step_end(self, engine: Any, row: dict[str, Any]) -> None:
        self.names.append(f"end {row['step']}")

    def on_log(self, engine: Any, row: dict[str, Any]) -> None:
        self.names.append(f"log {row['step']}")

    def on_save(self, engine: Any, checkpoint: Path) -> None:
        self.names.append(checkpoint.name)


@pytest.mark.parametrize("first", ["tp2 dp2", "pp2 1f1b"])
@pytest.mark.parametrize("second", ["one process", "dp2 zero3", "cp2 tp2"])
def test_a_checkpoint_loads_on_any_layout(
    ranks: Ranks, folders: dict[str, Path], tmp_path: Path, first: str, second: str
) -> None:
    """Steps after it are those of the engine that saved it, with its moments."""
    spec = spec_of(folders["llama"], LAYOUTS[first])
    going_on = ranks.run(spec.layout, saved_and_going_on, spec, tmp_path / "run")
    resumed_spec = spec_of(folders["llama"], LAYOUTS[second])
    resumed = ranks.run(resumed_spec.layout, resumed_steps, resumed_spec, tmp_path / "run")
    for one, other in zip(resumed[0], going_on[0], strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    assert len(load(tmp_path / "run").to_json()) > 0
    assert api.load_run(tmp_path / "run").spec.hidden == 64


def saved_and_going_on(mesh: Mesh, spec: RunSpec, out: Path) -> list[float]:
    calls = Calls()
    with Engine(spec, mesh=mesh, callbacks=[calls]) as engine:
        take_steps(engine, 2)
        assert engine.save(out).is_dir()
        assert calls.names == [
            "begin 0", "end 1", "log 1", "begin 1", "end 2", "log 2", "step-00000002",
        ]  # fmt: skip
        return take_steps(engine, 2)


def resumed_steps(mesh: Mesh, spec: RunSpec, run: Path) -> list[float]:
    with Engine(spec, mesh=mesh) as engine:
        engine.load(run)
        assert engine.steps == 2
        return take_steps(engine, 2)


def take_steps(engine: Engine, number: int) -> list[float]:
    """Losses and gradient norms of some steps, on batches by their numbers."""
    found = []
    for _ in range(number):
        engine.forward_backward(own_rows(whole_batch(engine.steps), engine.data_rank, engine.data_ranks))
        row = engine.step()
        found += [row["loss"], row["grad_norm"]]
    return found


# Memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one process", "dp2 zero3", "tp2"])
def test_offloaded_states_free_their_storages_and_come_back(
    ranks: Ranks, folders: dict[str, Path], layout: str
) -> None:
    spec = spec_of(folders["llama"], LAYOUTS[layout], train__ema=0.9)
    assert all(ranks.run(spec.layout, moved_out_and_back, spec))


def moved_out_and_back(mesh: Mesh, spec: RunSpec) -> bool:
    with Engine(spec, mesh=mesh) as engine:
        apart = Engine(spec, mesh=mesh)
        for each in (engine, apart):
            take_steps(each, 1)
        trainer = engine._trainer
        freed = engine.offload()
        flats = [unit.stored for unit in trainer.states.units] + [unit.full for unit in trainer.states.units]
        flats += [flat for moments in trainer.optimiser.moments.values() for flat in moments]
        assert all(flat.untyped_storage().nbytes() == 0 for flat in flats)
        assert freed >= 3 * 8 * sum(unit.part for unit in trainer.states.units)  # weights and two moments
        assert engine.offload() == 0
        for call in (engine.hf_state, engine.decoder, lambda: engine.log_probs(whole_batch())):
            with pytest.raises(UserError, match="call onload first"):
                call()
        engine.onload()
        assert take_steps(engine, 2) == take_steps(apart, 2)
        engine.forward_backward(own_rows(whole_batch(), engine.data_rank, engine.data_ranks))
        with pytest.raises(UserError, match="gradients wait for a step"):
            engine.offload()
        return True


def test_a_rate_that_is_given_is_taken_and_a_step_without_gradients_is_told(folders: dict[str, Path]) -> None:
    with Engine(spec_of(folders["llama"], {})) as engine:
        with pytest.raises(UserError, match="step: there is no gradient"):
            engine.step()
        engine.forward_backward(whole_batch(1))
        engine.zero_grad()
        with pytest.raises(UserError, match="step: there is no gradient"):
            engine.step()
        wanted = engine.forward_backward(whole_batch(), micro_batch=1)["loss"]
        engine.zero_grad()
        assert engine.forward_backward(whole_batch(), micro_batch=6)["loss"] == pytest.approx(
            wanted, rel=1e-12
        )
        before = dict(engine.hf_state())
        assert engine.step(lr=0.0)["lr"] == 0.0
        assert_same_tensors(dict(engine.hf_state()), before)


def test_gradients_that_are_not_finite_change_nothing(ranks: Ranks, folders: dict[str, Path]) -> None:
    spec = spec_of(folders["llama"], LAYOUTS["tp2 dp2"])
    assert all(ranks.run(spec.layout, skipped_step, spec))


def skipped_step(mesh: Mesh, spec: RunSpec) -> bool:
    with Engine(spec, mesh=mesh) as engine:
        before = dict(engine.hf_state())
        rows = own_rows(whole_batch(), engine.data_rank, engine.data_ranks)
        engine.forward_backward(rows, lambda log_probs, _: log_probs.sum() * torch.inf)
        skipped: bool = engine.step()["skipped"]
        assert_same_tensors(dict(engine.hf_state()), before)
        return skipped
