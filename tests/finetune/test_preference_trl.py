"""Training on pairs of answers equals TRL in float64: DPO with adapters of PEFT, SimPO and ORPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import peft
import pytest
import transformers
import trl
from chat_models import adapter_in, float64_throughout, model_in, opened, pair_rows, with_prompts, written
from safetensors.torch import load_file
from torch import Tensor
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_trainers import (
    SEQ_LEN,
    STEPS,
    PlainHead,
    Row,
    as_texts,
    common,
    most_apart,
    our_run,
    ours_spec,
    recorded,
    with_adapters,
)

from hf_models import read_whole
from meshwright import api
from meshwright.data.corpus import open_corpus
from meshwright.data.packing import IGNORE
from meshwright.spec import UserError
from meshwright.spec.preference import METRICS

ROWS: dict[str, list[Row]] = {
    "implicit prompts": pair_rows(1, 9),
    "prompts": with_prompts(pair_rows(2, 9)),
    "texts": as_texts(pair_rows(3, 9)),
}


@pytest.mark.parametrize("kind", ROWS)
def test_dpo_equals_trls(kind: str, tmp_path: Path) -> None:
    folder, rows = tmp_path / "model", ROWS[kind]
    model_in(folder)
    flags = {"lora__rank": 3, "lora__alpha": 12, "preference__beta": 0.4}
    corpus = written(rows, tmp_path / "pairs.jsonl")
    spec = ours_spec(folder, corpus, len(rows), **flags)
    found = our_run(spec, tmp_path / "ours")
    more = {"beta": 0.4, "max_length": SEQ_LEN // 2}
    trainer, losses = with_adapters(
        trl.DPOTrainer, trl.DPOConfig, spec, folder, rows, tmp_path / "trl", **more
    )
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-9)
    assert losses[-1] != pytest.approx(losses[0], rel=0.1)
    logged = [row for row in trainer.state.log_history if "rewards/margins" in row]
    for key in METRICS:  # the first step's answers are as likely as the reference's, and none is better
        assert [row[key] for row in found[1:]] == pytest.approx(
            [row[key.replace("_", "/", 1)] for row in logged[1:]], abs=1e-6
        )
    api.export(tmp_path / "ours", tmp_path / "adapter", adapter=True)
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = {name.replace(".default.", "."): each for name, each in trainer.model.named_parameters()}
    assert most_apart(ours, {name: each.detach() for name, each in theirs.items()}) < 1e-9


def trl_whole(
    kind: type[Any], config: type[Any], folder: Path, rows: list[Row], out: Path, **more: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a trainer of TRL without adapters, one pair at a time unless told, and the weights by our
    names."""
    losses: list[float] = []
    others = {"ref_model": more.pop("ref_model")} if "ref_model" in more else {}
    given = common(out, 1, **{"gradient_accumulation_steps": len(rows), "max_length": SEQ_LEN // 2} | more)
    trainer = recorded(kind, losses)(
        model=opened(folder), args=config(**given), train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder), **others,
    )  # fmt: skip
    with float64_throughout():
        trainer.train()
    model = trainer.model
    model.save_pretrained(out / "weights")
    by_step = np.array(losses).reshape(STEPS, -1).mean(1)
    return by_step.tolist(), dict(read_whole(out / "weights")[1])


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_simpo_equals_trls(packed: bool, tmp_path: Path) -> None:
    """On texts, as TRL's CPOTrainer ends a rendered chat with one more END."""
    folder, rows = tmp_path / "model", ROWS["texts"]
    model_in(folder)
    corpus = written(rows, tmp_path / "pairs.jsonl")
    flags: dict[str, object] = {
        "preference__loss": "simpo", "preference__beta": 2.0, "preference__simpo_gamma": 0.7,
        "preference__label_smoothing": 0.1,
    }  # fmt: skip
    samples = len(rows)
    if packed:
        flags["data__pack"] = "true"
        samples = open_corpus(ours_spec(folder, corpus, 1, **flags)).train.samples
        assert samples < len(rows)
    found = our_run(ours_spec(folder, corpus, samples, **flags), tmp_path / "ours")
    more = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1, "cpo_alpha": 0.0}
    losses, weights = trl_whole(CPOTrainer, CPOConfig, folder, rows, tmp_path / "trl", **more)
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-9)
    assert most_apart(api.load_run(tmp_path / "ours").tensors(), weights) < 1e-9


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_all_weights_with_a_stored_reference_equal_trls(loss: str, tmp_path: Path) -> None:
    """Against TRL's with a second model as its reference."""
    folder, rows = tmp_path / "model", ROWS["texts"]
    model_in(folder)
    corpus = written(rows, tmp_path / "pairs.jsonl")
    flags = {
        "preference__loss": loss,
        "preference__beta": 0.3,
        "preference__precompute_ref_log_probs": "true",
    }
    more: dict[str, Any] = {"beta": 0.3, "ref_model": opened(folder)}
    kind, config, samples = trl.DPOTrainer, trl.DPOConfig, len(rows)
    if loss == "kto":  # in one batch, as its estimate of a divergence is of that
        kind, config, samples = trl.KTOTrainer, trl.KTOConfig, 2 * len(rows)
        more |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": samples}
        more |= {"gradient_accumulation_steps": 1}
    found = our_run(ours_spec(folder, corpus, samples, **flags), tmp_path / "ours")
    with patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", PlainHead):
        losses, weights = trl_whole(kind, config, folder, rows, tmp_path / "trl", **more)
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-9)
    assert most_apart(api.load_run(tmp_path / "ours").tensors(), weights) < 1e-9


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_adapters_that_go_on_are_part_of_the_reference(loss: str, tmp_path: Path) -> None:
    """As TRL has it: the reference is the model that training begins with, adapters of before included."""
    folder, adapter, rows = tmp_path / "model", tmp_path / "adapter", ROWS["texts"]
    model_in(folder)
    adapter_in(adapter, folder, target_modules="all-linear")
    corpus = written(rows, tmp_path / "pairs.jsonl")
    flags = {"preference__loss": loss, "preference__beta": 0.3, "lora__weights": adapter}
    with pytest.raises(UserError, match=r"preference\.reference: 'base' is the model without .*adapter, and"):
        ours_spec(folder, corpus, len(rows), **flags)
    flags["preference__precompute_ref_log_probs"] = "true"
    kind, config, samples = trl.DPOTrainer, trl.DPOConfig, len(rows)
    more: dict[str, Any] = {"beta": 0.3, "max_length": SEQ_LEN // 2}
    if loss == "kto":
        kind, config, samples = trl.KTOTrainer, trl.KTOConfig, 2 * len(rows)
        more["train_sampling_strategy"] = "sequential"
    spec, losses = ours_spec(folder, corpus, samples, **flags), list[float]()
    found = our_run(spec, tmp_path / "ours")
    trainer = recorded(kind, losses)(
        model=peft.PeftModel.from_pretrained(opened(folder), adapter, is_trainable=True).double(),
        args=config(**common(tmp_path / "trl", samples, **more)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    with float64_throughout(), patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", PlainHead):
        trainer.train()
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-9)
    api.export(tmp_path / "ours", tmp_path / "tuned", adapter=True)
    ours = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    theirs = {name.replace(".default.", "."): each for name, each in trainer.model.named_parameters()}
    assert most_apart(ours, {name: each.detach() for name, each in theirs.items()}) < 1e-9


def test_orpo_equals_trls(tmp_path: Path) -> None:
    """Without prompts, as TRL's likelihood of the chosen answer is one of its prompt, too."""
    folder = tmp_path / "model"
    model_in(folder)
    rows = [row | {"prompt": ""} for row in ROWS["texts"]]
    corpus = written(rows, tmp_path / "pairs.jsonl")
    flags = {"preference__loss": "orpo", "preference__beta": 0.3}
    found = our_run(ours_spec(folder, corpus, len(rows), **flags), tmp_path / "ours")
    losses, weights = trl_whole(ORPOTrainer, ORPOConfig, folder, rows, tmp_path / "trl", beta=0.3)
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-9)
    assert most_apart(api.load_run(tmp_path / "ours").tensors(), weights) < 1e-9


@pytest.mark.parametrize("kind", ROWS)
def test_tokens_are_trls(kind: str, tmp_path: Path) -> None:
    """Also of answers that lose their ends, where both do."""
    folder, rows = tmp_path / "model", ROWS[kind]
    model_in(folder)
    corpus = written(rows, tmp_path / "pairs.jsonl")
    trainer = trl.DPOTrainer(
        model=opened(folder), args=trl.DPOConfig(**common(tmp_path / "trl", 1, max_length=SEQ_LEN)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=peft.LoraConfig(target_modules="all-linear"),
    )  # fmt: skip
    tokenized = list(trainer.train_dataset)
    lengths = [
        [len(row["prompt_ids"]) + len(row[key]) for key in ("chosen_ids", "rejected_ids")]
        for row in tokenized
    ]
    length = sorted(map(min, lengths))[len(rows) // 2] - 1
    trainer.data_collator.max_length = length
    flags = {"preference__loss": "simpo", "data__seq_len": 2 * length, "train__batch_tokens": 2 * length}
    train = open_corpus(ours_spec(folder, corpus, 1, **flags)).train
    samples, compared, cut, number = train.gather(np.arange(train.samples)), 0, 0, 0
    for row, whole in zip(tokenized, lengths, strict=True):
        if len(row["prompt_ids"]) >= length:  # it is left out by both
            continue
        number += 1
        if min(whole) < length < max(whole):  # TRL cuts it, and here it takes what the other one leaves
            continue
        theirs, compared, cut = trainer.data_collator([row]), compared + 1, cut + (min(whole) > length)
        for side in (0, 1):
            here = samples.documents[number - 1] == side
            size = min(whole[side], length)
            tokens = samples.tokens[number - 1][here][:size]
            targets = samples.targets[number - 1][here][: size - 1]
            wanted = theirs["input_ids"][side][:size].numpy()
            learned = theirs["completion_mask"][side][1:size].numpy()
            assert np.array_equal(tokens, wanted)
            assert np.array_equal(targets, np.where(learned, wanted[1:], IGNORE))
    assert number == train.samples
    assert cut > 0 and compared > cut
