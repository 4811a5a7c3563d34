"""Calls, output and exit codes of `verify`, and of `train --verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stand_ins import be_rank, last_json, stand_in

from meshwright import api
from meshwright.cli.main import main
from meshwright.rank.failure import RanksFailed, exit_code
from meshwright.spec import UserError
from meshwright.spec.errors import CollectiveError, NumericalError, StorageError

VERIFIED = {
    "equal": True,
    "worst_relative": 3e-16,
    "tolerance": 1e-10,
    "worst_name": "gradient: head.weight",
    "first": None,
    "compared": 9,
    "rows": [{"kind": "gradient", "compared": 9, "worst": 3e-16, "name": "head.weight"}],
    "narrowed": None,
    "layout": "dp 2",
    "steps": 3,
}


def test_verify_exits_with_1_when_unequal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "verify", VERIFIED)
    assert main(["verify", "--layout.dp", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "equal: dp 2 equals one device in float64 over 3 steps"
    assert shown[1].split() == ["precision", "compared", "relative", "difference", "tolerance", "name"]
    assert (
        shown[2].split() == ["float64", "9", "3.0e-16", "1.0e-10", "gradient:", "head.weight"]
        and len(shown) == 3
    )
    stand_in(monkeypatch, "verify", {**VERIFIED, "equal": False, "first": {"sentence": "step 1: the norm"}})
    assert main(["verify"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("UNEQUAL: dp 2 does not equal one device in float64\n")
    assert text.endswith("step 1: the norm\n")
    first = {
        "step": 1,
        "kind": "grad norm",
        "name": "grad norm",
        "relative": 0.5,
        "factor": 1.5,
        "detail": "",
    }
    worse = {"first": first | {"sentence": "step 1: the norm"}, "differences": [first]}
    stand_in(monkeypatch, "verify", {**VERIFIED, "equal": False, **worse})
    assert main(["verify", "--locate"]) == 1
    assert "step  kind       name       relative  factor" in capsys.readouterr().out
    assert main(["verify", "--json"]) == 1
    assert last_json(capsys)["equal"] is False
    stand_in(monkeypatch, "verify", {**VERIFIED, "equal": False, "worst_relative": None})
    assert main(["verify"]) == 1
    assert "float64 9 infinite 1.0e-10 gradient: head.weight" in " ".join(capsys.readouterr().out.split())


def test_verdict_and_narrowing_come_before_figures_and_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**VERIFIED, "precision": "fp32", "tolerance": 1e-6, "narrowed": "compared on a copy"}
    both = {**VERIFIED, "narrowed": "compared on a copy", "own": own}
    stand_in(monkeypatch, "verify", both)
    assert main(["verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "equal: dp 2 equals one device in float64 over 3 steps, and then in fp32", "compared on a copy"
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:]] == ["precision", "float64", "fp32"]
    assert main(["verify", "--verbose"]) == 0
    verbose = capsys.readouterr().out.splitlines()
    assert verbose[: len(lines)] == lines
    rows = [["kind", "compared", "worst", "name"], ["gradient", "9", "3e-16", "head.weight"]]
    assert [line.split() for line in verbose[len(lines) :]] == [
        [], ["float64,", "by", "kind:"], *rows, [], ["fp32,", "by", "kind:"], *rows
    ]  # fmt: skip
    stand_in(monkeypatch, "verify", {**both, "equal": False, "first": {"sentence": "step 1: the norm"}})
    assert main(["verify"]) == 1
    assert capsys.readouterr().out.startswith("UNEQUAL: dp 2 equals one device in float64, but not in fp32\n")
    with pytest.raises(UserError, match="--verbose: is of one layout"):
        main(["verify", "--sweep", "2", "--verbose"])


def test_train_verifies_its_layout_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, verify = stand_in(monkeypatch, "train", {"steps": 7}), stand_in(monkeypatch, "verify", VERIFIED)
    assert main(["train", "--layout.dp", "2", "--verify", "--resume", "auto", "--json"]) == 0
    assert verify.only == (*train.only[:1], {})
    first, last = capsys.readouterr().out.split("\n{")
    assert first.replace("\n ", "") == (
        "verified: dp 2 equals one device in float64 over 3 steps (9 tensors and numbers, the largest "
        "relative difference 3.0e-16)"
    )
    assert json.loads("{" + last)["steps"] == 7
    stand_in(monkeypatch, "verify", {**VERIFIED, "equal": False, "first": {"sentence": "step 1: the norm"}})
    assert main(["train", "--layout.dp", "2", "--verify"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "step 1: the norm"
    assert len(train.calls) == 1


def test_train_verifies_only_where_it_starts_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--verify: needs all ranks of the layout on this machine"):
        main(["train", "--verify", "--nodes", "2", "--out", "o"])
    be_rank(monkeypatch, 0)
    with pytest.raises(
        UserError, match=r"run `meshwright verify` first, .* `torchrun \.\.\. -m meshwright verify`"
    ):
        main(["train", "--verify", "--layout.dp", "2"])


def test_a_folder_that_train_would_refuse_is_refused_before_verifying(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train, verify = stand_in(monkeypatch, "train", {"steps": 7}), stand_in(monkeypatch, "verify", VERIFIED)
    (tmp_path / "run.json").write_text("{}")
    begun = ["train", "--layout.dp", "2", "--verify", "--out", str(tmp_path)]
    with pytest.raises(UserError, match="already holds a run; continue it with --resume auto"):
        main(begun)
    with pytest.raises(UserError, match="--resume: 'newest' is neither 'auto' nor a step"):
        main([*begun, "--resume", "newest"])
    assert not verify.calls and not train.calls


def test_an_unequal_layout_is_not_trained_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright.train.step import Trainer

    applied = Trainer.apply
    monkeypatch.setattr(Trainer, "apply", lambda self, totals, number: applied(self, totals, number + 1))
    out = tmp_path / "run"
    assert main(["train", "--model.preset", "tiny", *SMALL, "--out", str(out), "--verify"]) == 1
    assert "step 1: the first difference is in the update of" in capsys.readouterr().out.replace("\n ", "")
    assert not out.exists()


SMALL = ("--model.layers", "1", "--data.seq_len", "32", "--train.batch_tokens", "64", "--nproc", "1")


@pytest.mark.parametrize("start", ["here", "by torchrun"])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ValueError("a bug"), RanksFailed, 70),
        (RanksFailed("rank 1 of 2 failed with ValueError: a bug", 1), RanksFailed, 70),
        (RanksFailed("rank 1 of 2 was ended by SIGKILL", 137), RanksFailed, 137),
        (RanksFailed("rank 1 of 2 ended with exit code 3", 3), RanksFailed, 70),
        (StorageError("the checkpoint cannot be written"), StorageError, 76),
        (NumericalError("head.weight is not finite"), NumericalError, 78),
        (CollectiveError("rank 1 calls all_reduce: a bug"), CollectiveError, 70),
    ],
)
def test_verify_that_fails_has_another_exit_code_than_unequal(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], code: int, start: str
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(api, "verify", failing)
    if start == "by torchrun":
        be_rank(monkeypatch, 1)
    with pytest.raises(kind) as raised:
        main(["verify", "--layout.dp", "2"])
    assert exit_code(raised.value) == code
    assert str(error) in str(raised.value)
    assert str(raised.value).endswith("; the layout was not compared with one device")


def test_a_mistake_stays_one_under_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = UserError("steps: 0 steps compare nothing")
    monkeypatch.setattr(api, "verify", lambda *_, **__: (_ for _ in ()).throw(mistake))
    with pytest.raises(UserError) as raised:
        main(["verify", "--layout.dp", "2"])
    assert raised.value is mistake


def test_verify_passes_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    verify = stand_in(monkeypatch, "verify", VERIFIED)
    main(["verify", "--steps", "5", "--out", str(tmp_path / "v"), "--layout.dp", "2"])
    unused = {"through": None, "onto": None, "precision": "both"}
    assert verify.only[1] == {"steps": 5, "out": tmp_path / "v", **unused}


def test_verify_goes_through_a_checkpoint_onto_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = stand_in(monkeypatch, "verify", VERIFIED)
    main(["verify", "--layout.dp", "2", "--through", "export", "--onto", "tp=4, zero=1"])
    layout = verify.only[1]["onto"].layout
    assert (layout.dp, layout.tp, layout.zero) == (1, 4, 1)
    for wrong in ("tp", "tp=", "tp=2,"):
        with pytest.raises(UserError, match=r"--onto: .* such as dp=2,tp=2"):
            main(["verify", "--through", "checkpoint", "--onto", wrong])
    with pytest.raises(UserError, match="--onto: starts ranks of another layout"):
        main(["verify", "--load", "folder", "--onto", "tp=2"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["verify", "--through", "checkpoint"], "--through: starts the ranks itself, twice; give --save DIR"),
        (["verify", "--sweep", "2"], "--sweep: starts the ranks itself; start it without torchrun"),
        (["chaos", "--out", "o"], "chaos: starts the ranks itself, and some again; start it without"),
    ],
)
def test_what_starts_its_ranks_is_refused_in_a_rank_of_a_torchrun(
    monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    be_rank(monkeypatch, 1)
    with pytest.raises(UserError, match=sentence):
        main(words)
