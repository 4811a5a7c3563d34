"""Fine-tuning on chats equals TRL's SFTTrainer in float64: losses, gradients, and weights after ten steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
from chat_models import chats, model_in, opened, trained_by_trl, written
from torch import Tensor
from trl.data_utils import pack_dataset

from hf_models import read_whole
from meshwright import api
from meshwright.spec import load

SEQ_LEN = 96
STEPS = 10


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of the first step, before they are clipped."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        if not self.found:
            self.found = {name: each.grad.clone() for name, each in model.named_parameters()}


def trl_run(
    folder: Path, rows: list[dict[str, Any]], out: Path, samples: int, packing: bool
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, first gradients and last weights of TRL, which takes all samples in each step."""
    model, gradients = opened(folder), Gradients()
    how = {"packing": packing, "max_length": SEQ_LEN, "max_steps": STEPS}
    losses = trained_by_trl(model, folder, rows, out, samples, [gradients], **how)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    return losses, *(
        by_our_names(model, tensors, out / name)
        for name, tensors in (("gradients", gradients.found), ("weights", weights))
    )


def our_run(folder: Path, corpus: Path, out: Path, samples: int, **flags: object) -> tuple[list[float], Any]:
    """Losses of a run and its weights by the names of transformers."""
    given = {
        "model.hf": folder, "data.corpus": corpus, "data.cache": corpus.parent / "cache", "layout.dp": 1,
        "data.seq_len": SEQ_LEN, "data.val_fraction": 0, "train.batch_tokens": samples * SEQ_LEN,
        "train.steps": STEPS, "train.lr": 0.01, "train.warmup_steps": 0, "train.schedule": "constant",
        "train.weight_decay": 0, "precision.compute": "fp64",
    } | {key.replace("__", "."): value for key, value in flags.items()}  # fmt: skip
    api.train(load(None, [(key, str(value)) for key, value in given.items()]), out=out, quiet=True)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for line in lines if "loss" in (row := json.loads(line))]
    return losses, api.load_run(out).tensors()


def by_our_names(
    model: transformers.PreTrainedModel, tensors: dict[str, Tensor], out: Path
) -> dict[str, Tensor]:
    """Tensors of a model of transformers by the names that they have in a run."""
    model.save_pretrained(out, state_dict=tensors)
    return dict(read_whole(out)[1])


def most_apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - each).abs().max() / each.abs().max().clamp(min=1e-4))
        for name, each in theirs.items()
    )


@pytest.mark.parametrize("packing", [False, True], ids=["unpacked", "packed"])
def test_it_equals_trls(packing: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model_in(folder)
    rows = chats(1, 9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.apply_chat_template(row["messages"])["input_ids"] for row in rows]
    samples = len(rows)
    if packing:
        packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": ids}), seq_length=SEQ_LEN)
        samples = len(packed)
        assert samples < len(rows)
    losses, gradients, weights = trl_run(folder, rows, tmp_path / "trl", samples, packing)
    corpus = written(rows, tmp_path / "chats.jsonl")
    pack = str(packing).lower()
    found, ours = our_run(folder, corpus, tmp_path / "ours", samples, data__pack=pack)
    assert len(found) == STEPS
    assert found == pytest.approx(losses, rel=1e-9)
    assert most_apart(ours, weights) < 1e-9
    before = read_whole(folder)[1]
    flags = {
        "data__pack": pack,
        "train__optimiser": "sgd",
        "train__beta1": 0,
        "train__lr": 1,
        "train__steps": 1,
    }
    _, after = our_run(folder, corpus, tmp_path / "sgd", samples, **flags)
    assert most_apart({name: before[name] - after[name] for name in before}, gradients) < 1e-9
