"""Trainers of TRL on rows of answers, and runs of Meshwright on the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import peft
import torch
import transformers
import trl
from chat_models import float64_throughout, opened, with_prompts
from torch import Tensor

from meshwright import api
from meshwright.exchange.peft_adapter import names_in_file, peft_layers
from meshwright.spec import RunSpec, load
from meshwright.verify.reference.weights import initial_weights

SEQ_LEN = 256
STEPS = 6
Row = dict[str, Any]


def as_texts(rows: list[Row]) -> list[Row]:
    """Rows whose prompts and answers are texts."""
    texts = []
    for row in with_prompts(rows):
        said = {key: " ".join(each["content"] for each in messages) for key, messages in row.items()}
        texts.append(said | {"chosen": f" {said['chosen']}", "rejected": f" {said['rejected']}"})
    return texts


def recorded(kind: type[Any], losses: list[float]) -> type[Any]:
    """A trainer whose losses are kept as they are, before transformers rounds them."""

    class Recorded(kind):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss))
            return loss

    return Recorded


class PlainHead:
    """Log-probabilities of labels from whole logits, in the place of TRL's kernel, which sums in float32."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, _bias: Tensor | None, labels: Tensor, *_others: Any) -> Any:
        log_p = torch.log_softmax(x @ weight.T, -1)
        found = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        zeros = torch.zeros_like(found)
        return found, zeros, zeros, zeros, zeros > 0


def common(out: Path, samples: int, **more: Any) -> dict[str, Any]:
    """Arguments of a trainer of TRL that takes all pairs in each step."""
    return {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": samples,
        "learning_rate": 0.01, "weight_decay": 0.0, "lr_scheduler_type": "constant", "bf16": False,
        "max_grad_norm": 1.0, "adam_beta2": 0.95, "report_to": [], "logging_steps": 1, "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
    } | more  # fmt: skip


def ours_spec(folder: Path, corpus: Path, pairs: int, **flags: object) -> RunSpec:
    """A run that takes all pairs in each step, unpacked unless `flags` say how many samples they are."""
    given: dict[str, object] = {
        "model.hf": folder, "data.corpus": corpus, "data.cache": corpus.parent / "cache", "layout.dp": 1,
        "data.seq_len": SEQ_LEN, "data.val_fraction": 0, "train.batch_tokens": pairs * SEQ_LEN,
        "train.steps": STEPS, "train.lr": 0.01, "train.warmup_steps": 0, "train.schedule": "constant",
        "train.weight_decay": 0, "precision.compute": "fp64", "data.pack": "false",
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


def our_run(spec: RunSpec, out: Path) -> list[Row]:
    """The rows of metrics of a run's steps."""
    api.train(spec, out=out, quiet=True)
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def by_peft(spec: RunSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapters of a run by the names of PEFT."""
    assert spec.lora is not None
    return {
        name: each
        for layer in peft_layers(spec.model, spec.lora)
        for name, each in zip(names_in_file(layer), layer.to_peft(spec.lora.rank, tensors), strict=True)
    }


def with_adapters(
    kind: type[Any], config: type[Any], spec: RunSpec, folder: Path, rows: list[Row], out: Path, **more: Any
) -> tuple[Any, list[float]]:
    """A trainer that has trained with the run's initial adapters, and its losses."""
    assert spec.lora is not None
    losses: list[float] = []
    trainer = recorded(kind, losses)(
        model=opened(folder), args=config(**common(out, len(rows), **more)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=peft.LoraConfig(
            r=spec.lora.rank, lora_alpha=spec.lora.alpha, target_modules="all-linear"
        ),
    )  # fmt: skip
    drawn = by_peft(spec, initial_weights(spec.model, spec.train.seed, "fp64", spec.lora))
    own = {name.replace(".default.", "."): each for name, each in trainer.model.named_parameters()}
    with torch.no_grad():
        for name, each in drawn.items():
            own[name].data = each.double().clone()
    with float64_throughout(), patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", PlainHead):
        trainer.train()
    return trainer, losses


def most_apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest element."""
    assert ours.keys() <= theirs.keys() and ours
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-4))
        for name in ours
    )
