"""Batches and arguments that an engine cannot take end the call in a sentence, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_cases import LAYOUTS, spec_of, whole_batch
from hf_models import CASES, save_theirs
from meshwright.api.engine import Engine
from meshwright.api.engine_callbacks import EngineCallback
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec, UserError
from ranks import Ranks, RanksFailedError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The HF folder of a model in float64, by its case."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_theirs(folder.parent / "float32", *CASES["llama"]).double().save_pretrained(folder)
    return {"llama": folder}


WRONG: dict[str, dict[str, Tensor]] = {
    "has no input_ids": {"labels": torch.zeros(2, 4, dtype=torch.int64)},
    r"input_ids: has shape \[4\]": {"input_ids": torch.zeros(4, dtype=torch.int64)},
    "input_ids: is torch.float32": {"input_ids": torch.zeros(2, 4)},
    "input_ids: has token 101, which is outside": {"input_ids": torch.full((2, 4), 101)},
    "labels: has token -1,": {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.full((2, 4), -1)},
    r"labels: has shape \[2, 3\]": {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.zeros(2, 3, dtype=torch.int64)},
    "attention_mask: row 1 has padding between tokens": {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])},
    "seq_lens: adds up to 5": {
        "input_ids": torch.zeros(1, 4, dtype=torch.int64), "seq_lens": torch.tensor([2, 3])},
    "seq_lens: adds up to 3 in row 0, which has 4 tokens": {
        "input_ids": torch.zeros(1, 4, dtype=torch.int64), "seq_lens": torch.tensor([2, 1])},
    "batch.label: is not read; did you mean labels": {
        "input_ids": torch.zeros(1, 4, dtype=torch.int64), "label": torch.zeros(1, 4, dtype=torch.int64)},
    "position_ids: has negative positions": {
        "input_ids": torch.zeros(1, 2, dtype=torch.int64), "position_ids": torch.tensor([[-1, 0]])},
    "no rank has any samples": {"input_ids": torch.zeros(0, 4, dtype=torch.int64)},
}  # fmt: skip


def test_batches_that_cannot_be_taken_are_told(folders: dict[str, Path]) -> None:
    with Engine(spec_of(folders["llama"], {})) as engine:
        for message, batch in WRONG.items():
            with pytest.raises(UserError, match=message):
                engine.forward_backward(batch)
        for message, function in {
            "loss_fn: returned a tensor of shape": lambda log_probs, _: log_probs,
            "loss_fn: returned a number without a gradient": lambda log_probs, _: log_probs.detach().sum(),
        }.items():
            with pytest.raises(UserError, match=message):
                engine.forward_backward(whole_batch(), function)
        with pytest.raises(UserError, match="batch: is Tensor; give a dictionary"):
            engine.forward_backward(torch.zeros(2, 4))  # type: ignore[arg-type]


UNTRAINED = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.full((2, 4), -100)}
ARGUMENTS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    r'count: "a" does not count tokens or samples; give a finite one': (whole_batch(), {"count": "a"}),
    "count: -1 does not count": (whole_batch(), {"count": -1}),
    "count: nan does not count": (whole_batch(), {"count": float("nan")}),
    "count: adds up to 0 over all data ranks": (whole_batch(), {"count": 0}),
    "batch.labels: no token of any data rank is trained": (UNTRAINED, {}),
    "micro_batch: 0 does not count samples": (whole_batch(), {"micro_batch": 0}),
    r'micro_batch: "2" does not count samples': (whole_batch(), {"micro_batch": "2"}),
    "loss_fn: 8 cannot be called; .* as count=": (whole_batch(), {"loss_fn": 8}),
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_arguments_that_cannot_be_taken_are_told(folders: dict[str, Path], message: str) -> None:
    batch, arguments = ARGUMENTS[message]
    with Engine(spec_of(folders["llama"], {})) as engine:
        with pytest.raises(UserError, match=message):
            engine.forward_backward(batch, **arguments)
        if "micro_batch" in arguments:
            with pytest.raises(UserError, match=message):
                engine.log_probs(batch, **arguments)
        assert engine.forward_backward(whole_batch())["loss"] > 0  # nothing was lost
        engine.step()


class Silent:
    """A callback without the methods of one."""


CALLS: dict[str, Callable[[Engine], object]] = {
    "save: 5 is not a path; give one as a string": lambda engine: engine.save(5),  # type: ignore[arg-type]
    'save: "" is not a path': lambda engine: engine.save(""),
    r"save: .* is not a path": lambda engine: engine.save(b"run"),  # type: ignore[arg-type]
    "load: null is not a path": lambda engine: engine.load(None),  # type: ignore[arg-type]
    r'load: step "last" does not count steps': lambda engine: engine.load("run", "last"),  # type: ignore[arg-type]
    "load: step true does not count": lambda engine: engine.load("run", True),
    r'hf_state: dtype "bf16" is not a format of weights': lambda engine: [*engine.hf_state("bf16")],  # type: ignore[arg-type]
    r'decoder: dtype "torch.int8" is not a format': lambda engine: engine.decoder(torch.int8),
    "load_hf_state: was given int; give .name, tensor. pairs": lambda engine: engine.load_hf_state(5),  # type: ignore[arg-type]
    "load_hf_state: was given dict; .* items": lambda engine: engine.load_hf_state({}),  # type: ignore[arg-type]
    "load_hf_state: was given str in the place of": lambda engine: engine.load_hf_state(["ab"]),  # type: ignore[list-item]
    "callbacks: Silent is not a sequence": lambda engine: Engine(engine.spec, callbacks=Silent()),  # type: ignore[arg-type]
    "callbacks: .*Silent.* has not the methods": lambda engine: Engine(engine.spec, callbacks=[Silent()]),  # type: ignore[list-item]
    "callbacks: .*EngineCallback.* give objects": lambda engine: Engine(
        engine.spec, callbacks=[EngineCallback]
    ),  # type: ignore[list-item]
    "group: 8 is not a process group": lambda engine: Engine(engine.spec, 8),  # type: ignore[arg-type]
    "Engine: 5 is not a path": lambda _: Engine(5),  # type: ignore[arg-type]
    "from_pretrained: 5 is not a path": lambda _: Engine.from_pretrained(5),  # type: ignore[arg-type]
}


def test_what_other_calls_cannot_take_is_told(folders: dict[str, Path]) -> None:
    with Engine(spec_of(folders["llama"], {})) as engine:
        for message, call in CALLS.items():
            with pytest.raises(UserError, match=message):
                call(engine)
        assert engine.forward_backward(whole_batch())["loss"] > 0  # nothing was lost
    for length in ("long", 0, None):
        with pytest.raises(UserError, match=r"data.seq_len: .*should be"):
            Engine.from_pretrained(folders["llama"], data__seq_len=length)


def untrained_on_all_but_one(mesh: Mesh, spec: RunSpec) -> list[float]:
    """Counts of a batch of which one data rank trains nothing."""
    with Engine(spec, mesh=mesh) as engine:
        row = engine.forward_backward(UNTRAINED if engine.data_rank else whole_batch())
        return [row["count"], row["loss"]]


def test_a_data_rank_may_have_nothing_to_train(ranks: Ranks, folders: dict[str, Path]) -> None:
    spec = spec_of(folders["llama"], {"dp": 2})
    with Engine(spec_of(folders["llama"], {})) as engine:
        wanted = engine.forward_backward(whole_batch())
    for count, loss in ranks.run(spec.layout, untrained_on_all_but_one, spec):
        assert count == wanted["count"] and loss == pytest.approx(wanted["loss"], rel=1e-12)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, "fast"])
def test_a_rate_that_is_none_changes_nothing(folders: dict[str, Path], rate: Any) -> None:
    with Engine(spec_of(folders["llama"], {})) as engine:
        engine.forward_backward(whole_batch())
        with pytest.raises(UserError, match=r"step: lr is .*, which no step can take"):
            engine.step(lr=rate)
        assert engine.step(lr=1e-3)["lr"] == 1e-3


def test_states_are_offloaded_after_a_save(folders: dict[str, Path], tmp_path: Path) -> None:
    with Engine(spec_of(folders["llama"], {})) as engine:
        engine.forward_backward(whole_batch())
        engine.step()
        engine.save(tmp_path / "run")
        before = dict(engine.hf_state())
        engine.offload()
        engine.onload()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.hf_state())
        with pytest.raises(UserError, match="is the folder of an HF model"):
            engine.save(folders["llama"])


def test_ranks_that_share_samples_are_told_of_others(ranks: Ranks, folders: dict[str, Path]) -> None:
    spec = spec_of(folders["llama"], LAYOUTS["tp2"])
    with pytest.raises(RanksFailedError, match="ranks 0 and 1 are both of data rank 0 and were given"):
        ranks.run(spec.layout, other_samples, spec)


def other_samples(mesh: Mesh, spec: RunSpec) -> None:
    Engine(spec, mesh=mesh).forward_backward(whole_batch(mesh.rank))


def test_a_batch_that_one_rank_cannot_take_ends_the_call_on_all(
    ranks: Ranks, folders: dict[str, Path]
) -> None:
    spec = spec_of(folders["llama"], LAYOUTS["dp2 zero3"])
    found = ranks.run(spec.layout, one_bad_batch, spec)
    assert "rank 1 was given what it cannot take" in found[0]
    assert "has no input_ids" in found[1]


def one_bad_batch(mesh: Mesh, spec: RunSpec) -> str:
    engine = Engine(spec, mesh=mesh)
    with pytest.raises(UserError) as told:
        engine.forward_backward({} if mesh.rank else whole_batch())
    return str(told.value)
