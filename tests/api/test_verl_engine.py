"""verl's losses on an engine of Meshwright equal transformers' model with torch's autograd and AdamW."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine_cases import VOCAB, Steps, assert_same_steps, their_model
from hf_models import CASES, save_theirs
from meshwright.testing import run_on_ranks

pytest.importorskip("verl", reason="verl is not installed")
tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")

LENGTHS = [(3, 4), (2, 6), (4, 2), (3, 5)]
"""Tokens of each sample's prompt and response."""
STEPS = 2
LAYOUTS: list[dict[str, object]] = [
    {"layout.dp": 2, "layout.zero": 3},
    {"layout.tp": 2},
    {"layout.cp": 2},
    {"layout.pp": 2, "layout.stages": "even", "layout.schedule": "zb-h1"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_theirs(made / "float32", *CASES["llama"]).double().save_pretrained(made / "hf")
    return made / "hf"


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch(step: int, rows: slice = slice(None), temperature: float = 1.0) -> Any:
    """A batch as verl's workers have it, of some of the global batch's samples."""
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(step)
    fields: dict[str, list[Tensor]] = {}
    for prompt, response in LENGTHS:
        tokens = torch.randint(0, VOCAB, (prompt + response,), generator=draw)
        sample = {
            "input_ids": tokens,
            "position_ids": torch.arange(len(tokens)),
            "loss_mask": (torch.arange(len(tokens)) >= prompt).long(),
            "prompts": tokens[:prompt],
            "responses": tokens[prompt:],
            "response_mask": torch.ones(response, dtype=torch.int64),
            "old_log_probs": -4.6 + 0.1 * torch.randn(response, generator=draw, dtype=torch.float64),
            "advantages": torch.randn(1, generator=draw, dtype=torch.float64).expand(response).clone(),
        }
        for name, each in sample.items():
            fields.setdefault(name, []).append(each)
    return tensordict_utils.get_tensordict(
        {name: jagged(parts[rows]) for name, parts in fields.items()},
        {
            "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "calculate_entropy": True,
            "global_batch_size": len(LENGTHS), "temperature": temperature,
        },
    )  # fmt: skip


def loss_of(name: str) -> Any:
    """A loss function of verl's, with the configuration that its workers give it."""
    from functools import partial

    from verl.workers.config import ActorConfig
    from verl.workers.utils import losses

    if name == "sft":
        return partial(losses.sft_loss, None)
    config = ActorConfig(
        strategy="meshwright", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01,
        loss_agg_mode=name,
    )  # fmt: skip
    return partial(losses.ppo_loss, config)


def their_steps(folder: Path, name: str) -> Steps:
    """verl's loss of the whole batch, by transformers and torch."""
    from verl.utils import tensordict_utils

    found, model, loss_function = Steps(), their_model(folder), loss_of(name)
    named = dict(model.named_parameters())
    groups = [
        {"params": [each for each in named.values() if (each.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.01), (False, 0.0))
    ]
    optimiser = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999))
    for step in range(STEPS):
        data = batch(step)
        outputs: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
        for tokens in data["input_ids"].unbind():
            logs = model(tokens[None]).logits.log_softmax(-1)[0]
            next_logs = logs[:-1].gather(1, tokens[1:, None]).squeeze(1)
            outputs["log_probs"].append(torch.cat([next_logs, logs.new_zeros(1)]))
            outputs["entropy"].append(-(logs.exp() * logs).sum(-1))
        offsets = data["input_ids"].offsets()
        values = {
            key: torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
            for key, parts in outputs.items()
        }
        tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["loss_mask"].sum()))
        loss, _ = loss_function(model_output=values, data=data, dp_group=None)
        optimiser.zero_grad()
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimiser.step()
    found.weights = {key: each.detach().clone() for key, each in named.items()}
    return found


def our_steps(folder: Path, name: str, layout: dict[str, object], out: Path) -> tuple[bool, Steps]:
    """Steps of this rank by the calls of verl's TrainingWorker."""
    from verl.workers.config.optimizer import OptimizerConfig
    from verl.workers.engine.base import EngineRegistry

    from meshwright.api import verl_engine

    config = verl_engine.MeshwrightEngineConfig(
        keys={"precision.compute": "fp64", "train.eps": 1e-8, **layout}
    )
    engine = EngineRegistry.new(
        "language_model", "meshwright",
        model_config=SimpleNamespace(local_path=str(folder)), engine_config=config,
        optimizer_config=OptimizerConfig(lr=0.01), checkpoint_config=None,
    )  # fmt: skip
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    assert dist.get_world_size(engine.get_data_parallel_group()) == ranks
    engine.initialize()
    assert engine._engine.data_rank == rank
    rows = slice(rank * len(LENGTHS) // ranks, (rank + 1) * len(LENGTHS) // ranks)
    found = Steps()
    with engine.eval_mode():
        told = engine.infer_batch(batch(0, rows))["model_output"]["log_probs"]
    for step in range(STEPS):
        with engine.train_mode():
            output = engine.train_batch(batch(step, rows), loss_of(name))
        if step == 0 and name == "sft":  # the loss is that of what was inferred
            mask = batch(0, rows)["loss_mask"].values().roll(-1)
            own = float(-(told.values() * mask).sum())
            total = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(total, group=engine.get_data_parallel_group())
            found_loss = float(total) / sum(response for _, response in LENGTHS)
        if engine.is_mp_src_rank_with_outputs():
            loss = torch.tensor(sum(output["loss"]) / ranks, dtype=torch.float64)
            dist.all_reduce(loss, group=engine.get_data_parallel_group())
            found.losses.append(float(loss))
            found.norms.append(output["metrics"]["grad_norm"])
            if step == 0 and name == "sft":
                assert float(loss) == pytest.approx(found_loss, rel=1e-9)
            if name != "sft":
                assert len(output["metrics"]["actor/pg_loss"].values) == len(LENGTHS) // ranks
        assert engine.lr_scheduler_step() == 0.01
    pairs, adapter = engine.get_per_tensor_param()
    assert adapter is None
    found.weights = dict(pairs)
    engine.save_checkpoint(str(out))
    with engine.train_mode():
        engine.train_batch(batch(7, rows), loss_of(name))
    engine.load_checkpoint(str(out))
    again = dict(engine.get_per_tensor_param()[0])
    assert all(torch.equal(each, again[key]) for key, each in found.weights.items())
    with pytest.raises(Exception, match=r"temperature: 0\.5 divides the logits"):
        engine.infer_batch(batch(0, rows, 0.5))
    engine._engine.close()
    found.weights = {key: each.numpy() for key, each in found.weights.items()}  # type: ignore[misc]  # pickled
    return engine.is_mp_src_rank_with_outputs(), found


@pytest.mark.parametrize("name", ["sft", "token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_of_verl_equal_one_device(
    folder: Path, tmp_path: Path, name: str, layout: dict[str, object]
) -> None:
    wanted = their_steps(folder, name)
    results = run_on_ranks(2, our_steps, folder, name, layout, tmp_path / "run")
    assert any(outputs for outputs, _ in results)
    for outputs, found in results:
        if outputs:
            found.weights = {key: torch.as_tensor(each) for key, each in found.weights.items()}
            assert_same_steps(found, wanted)
