"""Batches and losses of engines' tests, and what transformers and torch's autograd make of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_models import transformers
from meshwright.api.engine import Engine
from meshwright.comm.mesh import Mesh
from meshwright.exchange.hf_stream import hf_state
from meshwright.spec import RunSpec, load

VOCAB, ROWS, LENGTH, STEPS = 101, 6, 11, 3
"""A length that context and tensor ranks cannot share, so that rows are padded."""
TRAIN = {
    "precision.compute": "fp64",
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.lr": 0.01,
    "data.seq_len": 16,
    "train.batch_tokens": 16 * 8,
    "layout.micro_batch": 2,
    "layout.stages": "even",
}
LAYOUTS: dict[str, dict[str, object]] = {
    "one process": {},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "tp2": {"tp": 2},
    "tp2 without sequence": {"tp": 2, "sequence_parallel": "false"},
    "cp2": {"cp": 2},
    "pp2 1f1b": {"pp": 2, "schedule": "1f1b"},
    "pp2 zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp2 dualpipe-v": {"pp": 2, "schedule": "dualpipe-v", "virtual": 2},
    "tp2 dp2": {"tp": 2, "dp": 2, "zero": 2},
    "cp2 tp2": {"cp": 2, "tp": 2},
    "pp2 cp2 dp2": {"pp": 2, "cp": 2, "dp": 2},
}
Named = dict[str, Tensor]
Batch = dict[str, Tensor]
Loss = Callable[..., Tensor]


def spec_of(folder: Path, layout: Mapping[str, object], **keys: object) -> RunSpec:
    """The run of the model in an HF folder on a layout."""
    given = {**TRAIN, "model.hf": folder} | {f"layout.{name}": value for name, value in layout.items()}
    given |= {name.replace("__", "."): value for name, value in keys.items()}
    return load(None, [(name, str(value)) for name, value in given.items()])


def whole_batch(step: int = 0, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """A global batch with padding on both sides, labels that are not trained, and numbers for losses."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=draw)
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    mask[-1, :3] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1, :4] = -100
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels,
        "advantages": torch.randn(rows, generator=draw, dtype=torch.float64),
        "old_log_probs": -4.6 + 0.3 * torch.randn(rows, length, generator=draw, dtype=torch.float64),
        "reference": -40 + torch.randn(rows, generator=draw, dtype=torch.float64),
        "clip": torch.tensor(0.2),
    }


def own_rows(batch: Batch, rank: int, ranks: int) -> Batch:
    """The rows of a data rank: pairs are dealt out, so that ranks may have unequally many."""
    pairs = len(batch["input_ids"]) // 2
    first, last = (2 * (place * pairs // ranks) for place in (rank, rank + 1))
    return {name: each[first:last] if each.ndim else each for name, each in batch.items()}


# Losses, each a sum over samples, with the count that it is divided by ------------------------------------


def policy_loss(log_probs: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """PPO's clipped objective (Schulman et al. 2017), a mean over each sample's tokens (GRPO)."""
    trained = trained_tokens(rows)
    ratio = (log_probs - rows["old_log_probs"]).exp()
    advantages, clip = rows["advantages"].unsqueeze(1), rows["clip"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -((gain * trained).sum(1) / trained.sum(1).clamp(min=1)).sum()


def entropy_loss(log_probs: Tensor, rows: Mapping[str, Tensor], entropies: Tensor) -> Tensor:
    """A policy gradient with a bonus for entropy."""
    return policy_loss(log_probs, rows) - 0.3 * (entropies * trained_tokens(rows)).sum()


def dpo_loss(log_probs: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """The preference loss of pairs that follow each other (Rafailov et al. 2023, DPO, equation 7)."""
    ratios = log_probs.sum(1) - rows["reference"]
    return -F.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).sum()


def trained_tokens(rows: Mapping[str, Tensor]) -> Tensor:
    """True for tokens that have a log-probability: labels but for each sample's first token."""
    trained = rows["labels"] != -100
    starts = rows["attention_mask"].cumsum(1) == 1
    return trained & ~starts


@dataclass(frozen=True)
class Objective:
    """A loss, its count of some rows, and whether it reads entropies; without a loss the cross-entropy."""

    loss: Loss | None
    count: Callable[[Batch], float] | None
    entropy: bool = False


OBJECTIVES = {
    "cross-entropy": Objective(None, None),
    "policy": Objective(policy_loss, lambda rows: len(rows["input_ids"])),
    "entropy": Objective(entropy_loss, lambda rows: len(rows["input_ids"]), True),
    "dpo": Objective(dpo_loss, lambda rows: len(rows["input_ids"]) / 2),
}


@dataclass
class Steps:
    """Numbers of some steps: loss, gradient norm and whole gradients of each, and the weights after all."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    weights: Named = field(default_factory=dict)


# One device ---------------------------------------------------------------------------------------------


def their_model(folder: Path) -> Any:
    """The model of a folder in transformers, also its norms and rotary positions in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    rope = model.config.rope_parameters
    width = model.config.hidden_size // model.config.num_attention_heads
    model.model.rotary_emb.forward = partial(_rotary, rope["rope_theta"], width)
    return model


def _norm(module: Any, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt() * module.weight


def _rotary(theta: float, width: int, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    rates = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = (position_ids.double().unsqueeze(-1) * rates).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def their_log_probs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies at the tokens' places, by their model; 0 without a label."""
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=positions).logits
    logs = logits.log_softmax(-1)[:, :-1]
    found = logs.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    trained = trained_tokens(batch)
    entropies = -(logs.exp() * logs).sum(-1)
    return tuple(F.pad(each, (1, 0)).masked_fill(~trained, 0) for each in (found, entropies))  # type: ignore[return-value]


def their_steps(folder: Path, objective: str) -> Steps:
    """Steps of transformers' model by torch's autograd and AdamW, on the whole batch at once."""
    what, found = OBJECTIVES[objective], Steps()
    model = their_model(folder)
    named = dict(model.named_parameters())
    decayed = [each for each in named.values() if each.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [each for each in named.values() if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        batch = whole_batch(step)
        log_probs, entropies = their_log_probs(model, batch)
        if what.loss is None or what.count is None:
            loss = -log_probs.sum() / trained_tokens(batch).sum()
        else:
            more = [entropies] if what.entropy else []
            loss = what.loss(log_probs, batch, *more) / what.count(batch)
        optimiser.zero_grad()
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.gradients.append({name: each.grad.clone() for name, each in named.items()})
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimiser.step()
    found.weights = {name: each.detach().clone() for name, each in named.items()}
    return found


# Engines ------------------------------------------------------------------------------------------------


def gradients_of(engine: Engine) -> Named:
    """The whole gradients of an engine before its step, by the names of HF; of routers' biases these."""
    trainer, held = engine._trainer, engine._gradients
    factor = 1 / (held.count * held._power)
    named = {**dict(trainer.states.gradients()), **trainer.balance.biases()}
    found = hf_state(engine.spec.model, named, engine.mesh, torch.float64, None)
    return {name: each if name.endswith("_bias") else each * factor for name, each in found}


def engine_steps(
    mesh: Mesh, spec: RunSpec, objective: str, parts: int = 1, rows: int = ROWS, length: int = LENGTH
) -> Steps:
    """Steps of an engine, each of which takes its batch in so many calls of `forward_backward`."""
    what, found = OBJECTIVES[objective], Steps()
    engine = Engine(spec, mesh=mesh)
    for step in range(STEPS):
        whole = whole_batch(step, rows, length)
        total = 0.0
        for part in range(parts):
            own = own_rows(own_rows(whole, part, parts), engine.data_rank, engine.data_ranks)
            if what.loss is None or what.count is None:
                row = engine.forward_backward(own)
            else:
                row = engine.forward_backward(own, what.loss, what.count(own), entropy=what.entropy)
            total += row["loss"] * row["count"]
        found.gradients.append(gradients_of(engine))
        result = engine.step()
        assert math.isclose(result["loss"], total / result["count"], rel_tol=1e-12)
        assert not result["skipped"] and result["step"] == step + 1 and result["lr"] == 0.01
        found.losses.append(result["loss"])
        found.norms.append(result["grad_norm"])
    found.weights = dict(engine.hf_state())
    engine.close()
    return found


def assert_same_steps(found: Steps, wanted: Steps, tolerance: float = 1e-9) -> None:
    """Assert that losses, norms, all gradients and weights are equal, relative to each tensor's size."""
    assert len(found.losses) == len(wanted.losses)
    for name in ("losses", "norms"):
        for one, other in zip(getattr(found, name), getattr(wanted, name), strict=True):
            assert abs(one - other) <= tolerance * abs(other), (name, one, other)
    for ours, theirs in [
        *zip(found.gradients, wanted.gradients, strict=True),
        (found.weights, wanted.weights),
    ]:
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            error = (ours[name].double() - value).abs().max() / value.abs().max()
            assert error <= tolerance, (name, float(error))
