"""Runs on pairs of answers: rows, what is counted and refused, metrics, and resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import pair_rows, tokenizer_in, with_prompts, written

from meshwright import api
from meshwright.api.verify_runs import on_chats
from meshwright.data.chat_formats import conversation_of
from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.packing import IGNORE
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.preference import METRICS
from meshwright.train.reference_run import FILE

ASKED = [{"role": "user", "content": "one two"}]
GOOD, BAD = ({"role": "assistant", "content": each} for each in ("three", "four"))
ROW: dict[str, Any] = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
JUDGED: dict[str, Any] = {"prompt": "one two", "completion": " three", "label": True}
TEXTS = {"prompt": "one two", "chosen": " three", "rejected": " four"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    tokenizer_in(made)
    return made


def spec_for(folder: Path, corpus: Path, **flags: object) -> RunSpec:
    given: dict[str, object] = {
        "data.corpus": corpus, "data.tokenizer": folder, "data.cache": folder.parent / "cache",
        "data.seq_len": 256, "data.val_fraction": 0, "model.vocab_size": 320, "model.max_seq_len": 256,
        "train.batch_tokens": 256, "layout.dp": 1, "preference.loss": "simpo",
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items() if value is not None])


def pairs_of(corpus: Corpus) -> list[tuple[str, str]]:
    """The texts that are trained on of each pair, chosen and rejected, in the order of their samples."""
    samples = corpus.train.gather(np.arange(corpus.train.samples))
    found = []
    for targets, documents in zip(samples.targets, samples.documents, strict=True):
        for first in range(0, int(documents.max()) + 1, 2):
            one, other = (targets[(documents == n) & (targets != IGNORE)] for n in (first, first + 1))
            found.append(tuple(corpus.tokenizer.decode(each.tolist()) for each in (one, other)))
    return found


@pytest.mark.parametrize("told", [True, False], ids=["told", "by its keys"])
@pytest.mark.parametrize(
    ("row", "answers"),
    [
        (ROW, ("three<|im_end|>\n", "four<|im_end|>\n")),
        ({"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}, ("three<|im_end|>\n", "four<|im_end|>\n")),
        ({**ROW, "prompt": "one two", "score": 3}, ("three<|im_end|>\n", "four<|im_end|>\n")),
        (TEXTS, (" three<|im_end|>", " four<|im_end|>")),
        ({"chosen": "one two three", "rejected": "one two four"}, (" three<|im_end|>", " four<|im_end|>")),
    ],
    ids=["implicit", "explicit", "repeated", "texts", "implicit texts"],
)
def test_a_row_of_each_kind_is_a_pair(
    row: dict[str, Any], answers: tuple[str, str], told: bool, folder: Path, tmp_path: Path
) -> None:
    rows = written([row], tmp_path / "rows.jsonl")
    corpus = open_corpus(spec_for(folder, rows, data__format="preference" if told else "auto"))
    assert corpus.pairs == corpus.marked == [True]
    assert pairs_of(corpus) == [answers]


def test_a_common_beginning_leaves_something_of_both() -> None:
    """As TRL's `extract_prompt`: all but the last of what the shorter one has."""
    same = conversation_of({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, GOOD]}, "preference")
    assert (same.prompt, same.completion, same.rejected) == ((ASKED[0],), (GOOD,), (GOOD,))
    longer = conversation_of(
        {"chosen": [*ASKED, GOOD, *ASKED, GOOD], "rejected": [*ASKED, GOOD]}, "preference"
    )
    assert longer.prompt == (ASKED[0],) and longer.rejected == (GOOD,)
    texts = conversation_of({"chosen": "a b", "rejected": "a c"}, "preference")
    assert (texts.prompt, texts.completion, texts.rejected) == ("a", " b", " c")


def test_pairs_share_samples_whole(folder: Path, tmp_path: Path) -> None:
    rows = pair_rows(5, 12)
    corpus = written(rows, tmp_path / "rows.jsonl")
    alone = open_corpus(spec_for(folder, corpus, data__pack="false"))
    packed = open_corpus(spec_for(folder, corpus))
    assert alone.train.samples == 12 > packed.train.samples
    assert sorted(pairs_of(alone)) == sorted(pairs_of(packed))
    samples = packed.train.gather(np.arange(packed.train.samples))
    for documents in samples.documents:
        assert (np.diff(documents) >= 0).all() and documents.max() % 2 == 1


def test_both_of_a_pair_are_held_out(folder: Path, tmp_path: Path) -> None:
    corpus = written(pair_rows(6, 40), tmp_path / "rows.jsonl")
    sizes = {"data__pack": "false"}
    for fraction in (1e-9, 0.3, 0.999999):
        found = open_corpus(spec_for(folder, corpus, data__val_fraction=fraction, **sizes))
        assert found.train.documents % 2 == found.validation.documents % 2 == 0
        assert found.train.documents > 0 < found.validation.documents
        assert found.train.documents + found.validation.documents == 80


def test_the_longer_answer_is_cut_and_pairs_without_room_are_left_out(folder: Path, tmp_path: Path) -> None:
    long = {"role": "assistant", "content": "red " * 150}
    asked = [{"role": "user", "content": "sun " * 150}]
    rows = [
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, long]},
        {"chosen": [*asked, GOOD], "rejected": [*asked, BAD]},
    ]
    corpus = written(rows, tmp_path / "rows.jsonl")
    with pytest.warns(UserWarning) as caught:
        found = open_corpus(spec_for(folder, corpus, data__pack="false"))
    said = [str(each.message) for each in caught]
    assert any("left out 1 pair of" in each and "no room for both answers is left" in each for each in said)
    assert any("a limit of 256 tokens cuts 1 of 2 answers in a pair of" in each for each in said)
    ((chosen, rejected),) = pairs_of(found)
    assert chosen == "three<|im_end|>\n" and rejected.startswith("red red") and "<|im_end|>" not in rejected
    (documents,) = found.train.gather(np.zeros(1, dtype=np.int64)).documents
    assert found.train.target_tokens == 256 and (documents == 1).sum() > (documents == 0).sum()


def test_an_empty_answer_is_counted(folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    silent = [{"role": "user", "content": "one"}]
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [ROW, {"prompt": silent, "chosen": [GOOD], "rejected": [{"role": "assistant", "content": ""}]}]
    corpus = open_corpus(spec_for(folder, written(rows, tmp_path / "rows.jsonl")))
    assert len(pairs_of(corpus)) == 1
    assert any("left out 1 pair with an answer without a token" in str(each.message) for each in recwarn)


def test_pairs_of_equal_answers_are_left_out(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    same = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, GOOD]}
    empty = {"prompt": "one two", "chosen": "", "rejected": ""}
    mixed = written([same, ROW, empty, same], tmp_path / "rows.jsonl")
    for flags in ({}, {"preference__loss": "kto", "lora__rank": 3}):
        corpus = open_corpus(spec_for(folder, mixed, **flags))
        assert corpus.train.documents == (4 if "lora__rank" in flags else 2)
    assert pairs_of(open_corpus(spec_for(folder, mixed))) == [("three<|im_end|>\n", "four<|im_end|>\n")]
    told = [str(each.message) for each in recwarn if "left out" in str(each.message)]
    assert told == [f"data.corpus: {mixed}: left out 3 pairs with equal answers; it has 1 pair left"]
    with pytest.raises(
        UserError, match=r"holds no chat to train on \(2 left out: 2 pairs with equal answers"
    ):
        open_corpus(spec_for(folder, written([same, empty], tmp_path / "none.jsonl")))


@pytest.mark.parametrize("label", [True, False])
def test_labels_that_are_all_the_same_are_told_once(
    label: bool, folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    flags = {"preference__loss": "kto", "lora__rank": 3}
    rows = [JUDGED | {"label": label}] * 3
    corpus = written(rows, tmp_path / "rows.jsonl")
    spec = spec_for(folder, corpus, **flags)
    open_corpus(spec)
    open_corpus(spec, "lazy")  # as other ranks of a host do
    (told,) = [str(each.message) for each in recwarn if "label" in str(each.message)]
    assert f"all 3 answers of {corpus} to train on have the label {str(label).lower()}" in told
    assert "nothing is learned from answers that are " + ("not wanted" if label else "wanted") in told
    assert f"add rows with the label {str(not label).lower()}" in told
    assert ("data.format prompt" in told) == label
    recwarn.clear()
    both = written([*rows, JUDGED | {"label": not label}], tmp_path / "both.jsonl")
    open_corpus(spec_for(folder, both, **flags))
    open_corpus(spec_for(folder, written([ROW], tmp_path / "pairs.jsonl"), **flags))
    assert not [each for each in recwarn if "label" in str(each.message)]


def test_tokenized_pairs_are_a_corpus(folder: Path, tmp_path: Path) -> None:
    rows = written(pair_rows(7, 9), tmp_path / "rows.jsonl")
    counts = api.tokenize(str(rows), str(folder), tmp_path / "out", vocab_size=320)
    assert counts.documents == 18
    ours, theirs = (open_corpus(spec_for(folder, each)) for each in (tmp_path / "out", rows))
    assert ours.digest == theirs.digest and pairs_of(ours) == pairs_of(theirs)


WRONG: dict[str, tuple[Sequence[dict[str, Any]], dict[str, object], str]] = {
    "no pairs": (
        [{"messages": [*ASKED, GOOD]}], {}, r"preference\.loss: 'simpo' compares two answers, .* no pairs",
    ),
    "no loss of pairs": (
        [ROW], {"preference__loss": None}, "has pairs of chosen and rejected answers, which need a loss of",
    ),
    "half a pair": ([{"chosen": [GOOD]}], {"data__format": "preference"}, "key 'rejected': it is missing"),
    "no messages": ([ROW | {"chosen": []}], {}, "key 'chosen': it has no message"),
    "a text and messages": ([ROW | {"chosen": "three"}], {}, "key 'rejected': it is .*; give a text"),
    "no room": ([ROW], {"data__seq_len": 8, "train__batch_tokens": 8}, r"data\.seq_len: no pair of"),
    "no reference": ([ROW], {"preference__loss": "dpo"}, "give --lora.rank 16, whose base is the reference"),
    "smoothed odds": (
        [ROW], {"preference__loss": "orpo", "preference__label_smoothing": 0.1}, "smoothing: 0.1 has no",
    ),
    "judged without kto": ([JUDGED], {}, r"has answers with a label, .* --preference.loss kto"),
    "kto without answers": (
        [{"messages": [*ASKED, GOOD]}], {"preference__loss": "kto", "lora__rank": 3},
        "'kto' learns from judged",
    ),
    "no label": (
        [JUDGED | {"label": 1}], {"preference__loss": "kto", "lora__rank": 3},
        "key 'label': it is 1; give true",
    ),
    "no reference of kto": ([JUDGED], {"preference__loss": "kto"}, "precompute_ref_log_probs = true, or"),
    "stored for none": (
        [ROW], {"preference__precompute_ref_log_probs": "true"},
        "precompute_ref_log_probs: true has no effect",
    ),
    "a weight for pairs": ([ROW], {"preference__desirable_weight": 2}, "desirable_weight: 2.0 has no effect"),
    "no margin": (
        [ROW], {"preference__loss": "dpo", "lora__rank": 3, "preference__simpo_gamma": 1},
        "gamma: 1.0 has no",
    ),
    "another format": ([ROW], {"data__format": "chat"}, r"data\.format: 'chat' has no pairs of answers"),
    "no mask": ([ROW], {"data__document_mask": "false"}, "lets a rejected answer see the chosen one"),
    "a teacher": ([ROW], {"distil__teacher": "x"}, "distil: a teacher changes the loss of tokens"),
    "further tokens": ([ROW], {"model__mtp_num_layers": 1}, r"does not go with \[preference\]"),
    "islands": (
        [ROW], {"layout__replicate": 2, "outer__every": 2, "train__batch_tokens": 512}, "outer.every: 2 was",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence(name: str, folder: Path, tmp_path: Path) -> None:
    rows, flags, sentence = WRONG[name]
    with pytest.raises(UserError, match=sentence):
        open_corpus(spec_for(folder, written([*rows], tmp_path / "rows.jsonl"), **flags))


def test_a_comparison_in_own_precision_is_refused(folder: Path, tmp_path: Path) -> None:
    spec = spec_for(folder, written([ROW], tmp_path / "rows.jsonl"))
    with pytest.raises(UserError, match=r"preference: --precision run compares cross-entropy alone"):
        api.verify(spec, precision="run")
    assert on_chats(spec).data.format == "auto"


SMALL: dict[str, object] = {
    "model__layers": 2, "model__hidden": 32, "model__ffn": 48, "model__heads": 4, "model__kv_heads": 2,
    "data__seq_len": 256, "train__batch_tokens": 1024, "train__lr": 0.02, "train__warmup_steps": 0,
    "train__log_every": 1, "data__val_fraction": 0.2, "train__eval_every": 6, "lora__rank": 4,
    "lora__dropout": 0.1, "preference__loss": "dpo", "model__init_std": 0.2,
}  # fmt: skip


STORED: dict[str, object] = {"preference__precompute_ref_log_probs": "true"}


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_reports_and_resumes_to_the_bit(folder: Path, tmp_path: Path) -> None:
    corpus = written(with_prompts(pair_rows(8, 40)), tmp_path / "rows.jsonl")
    whole = spec_for(folder, corpus, **SMALL, train__steps=20)
    result = api.train(whole, out=tmp_path / "whole", quiet=True)
    steps = [row for row in rows_of(tmp_path / "whole") if "loss" in row]
    first, last = steps[0], steps[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert last["loss"] < 0.4 and last["rewards_accuracies"] > 0.9
    for row in steps:
        margin = row["rewards_chosen"] - row["rewards_rejected"]
        assert row["rewards_margins"] == pytest.approx(margin, abs=1e-5)
    held_out = [row for row in rows_of(tmp_path / "whole") if "val_loss" in row]
    assert [row["step"] for row in held_out] == [6, 12, 18, 20]
    assert "val_bits_per_byte" not in held_out[-1] and result["val_bits_per_byte"] is None
    assert all(f"val_{key}" in held_out[-1] for key in METRICS)
    page = Path(api.report([tmp_path / "whole"])["page"]).read_text()
    assert "Rewards of answers" in page and "nats per pair" in page
    with pytest.raises(UserError, match="holds out pairs of answers, whose bits per byte say nothing"):
        api.evaluate(tmp_path / "whole")
    half = spec_for(folder, corpus, **SMALL, train__steps=20, train__stop_at=11)
    api.train(half, out=tmp_path / "half", quiet=True)
    resumed = api.train(whole, out=tmp_path / "half", resume="auto", quiet=True)
    assert resumed["parameters_sha256"] == result["parameters_sha256"]
    other = spec_for(folder, corpus, **SMALL, train__steps=22, preference__beta=0.2)
    with pytest.raises(UserError, match=r"preference\.beta was 0\.1 and is 0\.2"):
        api.train(other, out=tmp_path / "half", resume="auto", quiet=True)


@pytest.mark.parametrize("labels", [(True, False), (True,), (False,)], ids=["both", "wanted", "unwanted"])
def test_a_validation_of_judged_answers_has_their_rewards(
    labels: tuple[bool, ...], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": labels[number % len(labels)]}
        for number, row in enumerate(with_prompts(pair_rows(8, 24)))
    ]
    flags = {**SMALL, "preference__loss": "kto", "train__steps": 2, "data__val_fraction": 0.3}
    spec = spec_for(folder, written(rows, tmp_path / "rows.jsonl"), **flags)
    api.train(spec, out=tmp_path / "run")
    (row,) = [row for row in rows_of(tmp_path / "run") if "val_loss" in row]
    assert "val_bits_per_byte" not in row
    chosen, rejected = row.get("val_rewards_chosen"), row.get("val_rewards_rejected")
    assert (chosen is not None, rejected is not None) == (True in labels, False in labels)
    said = "reward of wanted answers" if rejected is None else "reward of unwanted answers"
    shown = chosen if rejected is None else rejected
    if chosen is not None and rejected is not None:
        assert row["val_rewards_margins"] == pytest.approx(chosen - rejected)
        said, shown = "reward margin", row["val_rewards_margins"]
    line = f"validation at step 2/2  loss {row['val_loss']:.4f}  {said} {shown:.4f}"
    assert line in capsys.readouterr().out.splitlines()


def test_a_checkpoint_keeps_the_reference() -> None:
    """After a resume, too, the loss compares with the base that the run began with."""
    flags = {
        "data.corpus": "synthetic", "data.seq_len": 32, "train.batch_tokens": 128, "model.vocab_size": 61,
        "lora.rank": 4, "preference.loss": "dpo", "layout.dp": 1, "train.steps": 4, "train.warmup_steps": 1,
    } | {key.replace("__", "."): SMALL[key] for key in SMALL if key.startswith("model")}  # fmt: skip
    spec = load(None, [(key, str(value)) for key, value in flags.items()])
    found = api.verify(spec, steps=2, through="checkpoint", precision="exact")
    assert found["equal"], found["first"]
    assert {"step 1 loss", "step 2 loss", "step 2 parameter"} <= {row["kind"] for row in found["rows"]}


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param(
            "dpo", {"layout__dp": 2, "layout__zero": 3}, id="dpo on two ranks", marks=pytest.mark.full
        ),
        pytest.param("kto", {}, id="kto"),
        pytest.param("dpo", {}, id="dpo", marks=pytest.mark.full),
    ],
)
def test_a_stored_reference_gives_the_same_numbers(
    how: str, layout: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    corpus = written(with_prompts(pair_rows(8, 24)), tmp_path / "rows.jsonl")
    flags = {**SMALL, "preference__loss": how, "precision__compute": "fp64", "train__steps": 6} | layout

    def rows(name: str, **more: object) -> list[dict[str, Any]]:
        api.train(spec_for(folder, corpus, **{**flags, **more}), out=tmp_path / name, quiet=True)
        return [row for row in rows_of(tmp_path / name) if "loss" in row or "val_loss" in row]

    asked, stored = rows("asked"), rows("stored", **STORED)
    assert len(stored) == len(asked) > 6
    compared = {"loss", "val_loss", "grad_norm", "rewards_margins", "kl"}
    for row, other in zip(stored, asked, strict=True):
        for key in compared & row.keys():
            assert row[key] == pytest.approx(other[key], rel=1e-12, abs=1e-12), key


def test_all_weights_learn_from_a_stored_reference_and_resume(folder: Path, tmp_path: Path) -> None:
    corpus = written(with_prompts(pair_rows(8, 24)), tmp_path / "rows.jsonl")
    flags = {**SMALL, **STORED, "lora__rank": None, "lora__dropout": None, "train__lr": 0.003}
    whole = spec_for(folder, corpus, **flags, train__steps=8)
    result = api.train(whole, out=tmp_path / "whole", quiet=True)
    steps = [row for row in rows_of(tmp_path / "whole") if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and steps[-1]["loss"] < 0.6
    half = spec_for(folder, corpus, **flags, train__steps=8, train__stop_at=4)
    api.train(half, out=tmp_path / "half", quiet=True)
    kept = (tmp_path / "half" / FILE).read_bytes()
    other = spec_for(folder, corpus, **flags, train__steps=2, train__seed=5)
    api.train(other, out=tmp_path / "other", quiet=True)

    def refused(
        file: bytes | None, sentence: str, spec: RunSpec = whole, out: str = "half", **how: Any
    ) -> None:
        (tmp_path / out).mkdir(exist_ok=True)
        (tmp_path / out / FILE).unlink(missing_ok=True)
        if file is not None:
            (tmp_path / out / FILE).write_bytes(file)
        with pytest.raises(UserError, match=sentence):
            api.train(spec, out=tmp_path / out, quiet=True, **how)

    refused(None, "is not there, and the model that it was computed with", resume="auto")
    refused(kept[:-60], "cannot be read .* computed again", resume="auto")
    theirs = (tmp_path / "other" / FILE).read_bytes()
    refused(theirs, "was trained with other log-probabilities of the reference", resume="auto")
    refused(theirs, "is of another model", out="new")
    more = written(with_prompts(pair_rows(9, 24)), tmp_path / "more.jsonl")
    refused(kept, "is of other data", spec_for(folder, more, **flags, train__steps=8), "new")
    (tmp_path / "half" / FILE).write_bytes(kept)
    resumed = api.train(whole, out=tmp_path / "half", resume="auto", quiet=True)
    assert resumed["parameters_sha256"] == result["parameters_sha256"]
