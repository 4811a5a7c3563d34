"""Training on judged answers by KTO equals TRL's KTOTrainer in float64, with adapters of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from chat_models import model_in, pair_rows, with_prompts, written
from safetensors.torch import load_file
from trl_trainers import SEQ_LEN, Row, as_texts, most_apart, our_run, ours_spec, with_adapters

from meshwright import api
from meshwright.data.corpus import open_corpus
from meshwright.data.packing import IGNORE


def judged(rows: list[Row], start: int = 0) -> list[Row]:
    """One answer of each pair, the chosen one of two in three."""
    found = []
    for number, row in enumerate(rows, start):
        label = number % 3 != 1
        found.append(
            {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
        )
    return found


ROWS: dict[str, list[Row]] = {
    "texts": judged(as_texts(pair_rows(3, 9))),
    "chats": judged(with_prompts(pair_rows(2, 8))),
    "pairs": with_prompts(pair_rows(4, 5)),
}
KTO: dict[str, Any] = {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.8}


@pytest.mark.parametrize("kind", ROWS)
def test_kto_equals_trls(kind: str, tmp_path: Path) -> None:
    folder, rows = tmp_path / "model", ROWS[kind]
    model_in(folder)
    examples = len(rows) * (2 if kind == "pairs" else 1)
    flags = {"lora__rank": 3, "lora__alpha": 12, "preference__loss": "kto"}
    flags |= {f"preference__{key}": value for key, value in KTO.items()}
    spec = ours_spec(folder, written(rows, tmp_path / "rows.jsonl"), examples, **flags)
    found = our_run(spec, tmp_path / "ours")
    more = {**KTO, "max_length": SEQ_LEN // 2, "train_sampling_strategy": "sequential"}
    more["per_device_train_batch_size"] = examples
    trainer, losses = with_adapters(
        trl.KTOTrainer, trl.KTOConfig, spec, folder, rows, tmp_path / "trl", **more
    )
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-9)
    assert losses[-1] != pytest.approx(losses[0], rel=0.1)
    logged = [row for row in trainer.state.log_history if "rewards/margins" in row]
    for key in ("rewards_chosen", "rewards_rejected", "rewards_margins", "kl"):
        assert [row[key] for row in found] == pytest.approx(
            [row[key.replace("_", "/", 1)] for row in logged], abs=1e-6
        )
    assert max(row["kl"] for row in found) > 0.01
    api.export(tmp_path / "ours", tmp_path / "adapter", adapter=True)
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = {name.replace(".default.", "."): each for name, each in trainer.model.named_parameters()}
    assert most_apart(ours, {name: each.detach() for name, each in theirs.items()}) < 1e-9


@pytest.mark.parametrize("kind", ROWS)
def test_documents_are_answers_and_their_prompts_before_others(kind: str, tmp_path: Path) -> None:
    """Those of TRL: the prompt of each row before the answer of the row before."""
    folder, rows = tmp_path / "model", ROWS[kind]
    model_in(folder)
    flags = {"preference__loss": "kto", "lora__rank": 3}
    train = open_corpus(ours_spec(folder, written(rows, tmp_path / "rows.jsonl"), 1, **flags)).train
    samples = train.gather(np.arange(train.samples))

    def parts(sample: int, numbers: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """The prompt and the answer of a document."""
        here = np.isin(samples.documents[sample], numbers)
        tokens, targets = samples.tokens[sample][here], samples.targets[sample][here]
        prompt = int((targets != IGNORE).argmax()) + 1
        return tokens[:prompt].tolist(), targets[targets != IGNORE].tolist()

    answers = [parts(number, (0, 2)) for number in range(train.samples)]
    others = [parts(number, (1, 3)) for number in range(train.samples)]
    assert [one[0] for one in answers] == [other[0] for other in others]
    turn = list(range(train.samples))
    if kind == "pairs":
        turn = [*turn[::2], *turn[1::2]]
    for place, number in enumerate(turn):
        assert others[number][1] == answers[turn[place - 1]][1]
    labels = [bool((samples.documents[number] < 2).all()) for number in range(train.samples)]
    assert labels == ([True, False] * len(rows) if kind == "pairs" else [row["label"] for row in rows])
