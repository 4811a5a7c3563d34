"""Runs with a teacher: from a run's folder, an HF folder, or stored answers; resumes, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright import api
from meshwright.api.start_checks import check_start
from meshwright.checkpoint.directory import published
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.distil.stored_answers import FILES, RECORD
from meshwright.distil.teacher import Teacher
from meshwright.infer.soft_target_source import soft_targets_of, write_answers
from meshwright.spec import RunSpec
from meshwright.spec.errors import UserError
from meshwright.spec.other_models import refuse_other_models, teacher_of
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks, RanksFailedError
from small import first_batches
from training_runs import spec_of, start

BIGGER: dict[str, object] = {"model__layers": 3, "model__hidden": 48, "model__ffn": 64, "model__kv_heads": 4}
SHORT: dict[str, object] = {"train__steps": 4, "layout__micro_batch": 1}
TAUGHT: dict[str, object] = {**SHORT, "distil__top_k": 8, "distil__weight": 0.6}


@pytest.fixture(scope="module")
def teacher(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained run, with its record."""
    out = tmp_path_factory.mktemp("teacher")
    spec = spec_of(corpus, layout__dp=2, layout__zero=3, checkpoint__every=2, **SHORT, **BIGGER)
    start(ranks, spec, out)
    (out / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
    return out


def learn(mesh: Mesh, spec: RunSpec, out: Path, resume: str | None) -> dict[str, Any]:
    run = open_run(
        spec,
        mesh,
        out,
        Observers([]),
        soft_targets=lambda corpus: soft_targets_of(spec, mesh, corpus, out),
    )
    result = run.execute(resume)
    names = {"loss": "final_loss", "val_loss": "val_loss", "sha256": "parameters_sha256"}
    return {name: result[key] for name, key in names.items()}


def learned(ranks: Ranks, spec: RunSpec, out: Path, resume: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(spec.layout, learn, spec, out, resume)[0]
    return found


def ask(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Any]:
    return write_answers(spec, mesh, open_corpus(spec), out, lambda _done, _of: None)


def answered(mesh: Mesh, spec: RunSpec) -> list[tuple[str, str, float]]:
    """The messages over the world of a teacher's answers about a step."""
    own = teacher_of(spec)
    assert own is not None
    teacher, (batch,) = Teacher(spec, own, mesh), first_batches(spec, mesh, 1)
    mesh.wire.clear()
    mesh.wire.log = []
    teacher(batch)
    return [call for call in mesh.wire.log if call[0] == "world"]


@pytest.mark.parametrize("top_k", [8, pytest.param(None, marks=pytest.mark.full)])
def test_two_messages_move_tokens_and_answers(
    ranks: Ranks, corpus: Path, teacher: Path, top_k: int | None
) -> None:
    """Both stages of the teacher get the samples of both data ranks, and the last one answers about all."""
    layout = {"layout__dp": 2, "distil__pp": 2, "distil__top_k": top_k or "none"}
    spec = spec_of(corpus, distil__teacher=teacher, **SHORT, **layout)
    calls = ranks.run(spec.layout, answered, spec)
    tokens, numbers = spec.train.batch_tokens // 2, 2 * top_k + 1 if top_k else spec.model.vocab_size
    question, answer = calls[0]
    assert question[1] == answer[1] == "all_to_all"
    assert sum(each[0][2] for each in calls) == 2 * tokens * 3 * 8  # token, position, document
    assert sum(each[1][2] for each in calls) == tokens * numbers * 4


def test_stored_answers_are_those_of_the_teacher(
    ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path
) -> None:
    asked = {**TAUGHT, "distil__teacher": teacher}
    streamed = learned(ranks, spec_of(corpus, **asked), tmp_path / "streamed")
    alone = learned(ranks, spec_of(corpus, **SHORT), tmp_path / "alone")
    assert streamed["sha256"] != alone["sha256"]
    writing = spec_of(corpus, layout__cp=2, layout__dp=2, distil__tp=2, **asked)
    record = ranks.run(writing.layout, ask, writing, tmp_path / "answers")[0]
    assert record["samples"] == len(np.load(tmp_path / "answers" / FILES[0]))
    stored = sum(np.load(tmp_path / "answers" / name).nbytes for name in FILES[1:])
    assert stored == record["samples"] * writing.data.seq_len * (8 * 8 + 4)
    reading = {**TAUGHT, "distil__logits": tmp_path / "answers"}
    for number, layout in enumerate(({}, {"layout__tp": 2, "layout__pp": 2}, {"layout__cp": 2})):
        found = learned(ranks, spec_of(corpus, **reading, **layout), tmp_path / f"stored-{number}")
        assert found["loss"] == pytest.approx(streamed["loss"], rel=1e-5)


def test_a_resumed_student_ends_bitwise_as_one_that_was_not_stopped(
    ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path
) -> None:
    flags = {**TAUGHT, "distil__teacher": teacher, "distil__tp": 2, "layout__dp": 2, "layout__zero": 2}
    whole = learned(ranks, spec_of(corpus, checkpoint__every=2, **flags), tmp_path / "other")
    shutil.rmtree(published(tmp_path / "other" / "checkpoints")[4])
    shutil.copytree(tmp_path / "other", tmp_path / "rest")
    assert learned(ranks, spec_of(corpus, **flags), tmp_path / "rest", "2") == whole
    shutil.copytree(tmp_path / "other", tmp_path / "another layout")
    moved = learned(ranks, spec_of(corpus, **flags | {"distil__tp": 1}), tmp_path / "another layout", "2")
    assert moved["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    shutil.copytree(tmp_path / "other", tmp_path / "alone")
    alone = {**SHORT, "layout__dp": 2, "layout__zero": 2}
    assert learned(ranks, spec_of(corpus, **alone), tmp_path / "alone", "2")["loss"] > 1.05 * whole["loss"]
    with pytest.raises(RanksFailedError, match=r"distil.weight was 0.6 and is 0.7"):
        learned(ranks, spec_of(corpus, **flags | {"distil__weight": 0.7}), tmp_path / "other", "2")
    again = tmp_path / "another teacher"
    spec = spec_of(corpus, train__seed=1, **SHORT, **BIGGER)
    start(ranks, spec, again)
    (again / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
    with pytest.raises(RanksFailedError, match=r"learned from a teacher's checkpoint of step 4 .*give that"):
        learned(ranks, spec_of(corpus, **flags | {"distil__teacher": again}), tmp_path / "other", "2")


def test_a_teacher_may_be_an_hf_folder(ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path) -> None:
    """Equal weights, with their tokenizer, give an equal loss; the folder is imported once."""
    api.export(teacher, tmp_path / "hf")
    open_corpus(spec_of(corpus)).tokenizer.save(tmp_path / "hf", 16)
    losses = [
        learned(ranks, spec_of(corpus, distil__teacher=folder, **TAUGHT), tmp_path / folder.name)["loss"]
        for folder in (teacher, tmp_path / "hf")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (tmp_path / "hf" / "teacher" / "run.json").is_file()


def test_a_teacher_with_another_tokenizer_is_refused(
    ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path
) -> None:
    spec = spec_of(corpus, distil__teacher=teacher, **TAUGHT | {"data__tokenizer": "bpe"})
    with pytest.raises(RanksFailedError, match=r"has another tokenizer \(SHA-256 .*give the teacher's token"):
        learned(ranks, spec, tmp_path / "run")


def test_an_hf_folder_that_lacks_a_file_is_refused_until_it_is_there(
    ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path
) -> None:
    folder = tmp_path / "hf"
    api.export(teacher, folder)
    weights = (folder / "model.safetensors").rename(tmp_path / "weights")
    spec = spec_of(corpus, distil__teacher=folder, **TAUGHT)
    with pytest.raises(RanksFailedError, match=r"hf has no tokenizer to compare .* with its tokenizer.json"):
        learned(ranks, spec, tmp_path / "run")
    open_corpus(spec_of(corpus)).tokenizer.save(folder, 16)
    with pytest.raises(RanksFailedError, match=r"has neither model.safetensors nor .*give a folder with"):
        learned(ranks, spec, tmp_path / "run")
    weights.rename(folder / "model.safetensors")
    learned(ranks, spec, tmp_path / "run")


def test_a_run_is_not_its_own_teacher(corpus: Path, teacher: Path) -> None:
    spec = spec_of(corpus, distil__teacher=teacher, **SHORT, **BIGGER)
    with pytest.raises(UserError, match=r"is the run's own folder, whose weights change; copy the folder"):
        check_start(spec, teacher, "auto")


def test_a_damaged_teacher_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path) -> None:
    """No earlier checkpoint takes its place, which the record would not name."""
    damaged = tmp_path / "damaged"
    shutil.copytree(teacher, damaged)
    newest = max((damaged / "checkpoints").glob("step-*"))
    file = next(path for path in newest.rglob("*") if path.stat().st_size > 10_000)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RanksFailedError, match=str(newest.name)):
        learned(ranks, spec_of(corpus, distil__teacher=damaged, **TAUGHT), tmp_path / "run")
    shutil.rmtree(damaged / "checkpoints")
    with pytest.raises(RanksFailedError, match=r"damaged has no checkpoint yet; train it first"):
        learned(ranks, spec_of(corpus, distil__teacher=damaged, **TAUGHT), tmp_path / "run")


def test_answers_that_do_not_fit_are_refused(
    ranks: Ranks, corpus: Path, tmp_path: Path, teacher: Path
) -> None:
    asked = spec_of(corpus, distil__teacher=teacher, **TAUGHT | {"train__steps": 1, "train__warmup_steps": 1})
    out = tmp_path / "answers"
    ranks.run(asked.layout, ask, asked, out)
    stored = {**TAUGHT, "distil__logits": out}
    for flags, words in (
        ({"distil__top_k": 7}, r"top_k: 7 is not that of .*, 8; give 8"),
        ({"distil__temperature": 2.0}, r"temperature: 2.0 is not that of"),
        ({"data__seq_len": 32, "train__batch_tokens": 256}, r"is about other data"),
        ({}, r"has no answer about sample \d+"),
        ({"distil__logits": tmp_path}, r"was not written by `meshwright distil`"),
    ):
        with pytest.raises(RanksFailedError, match=words):
            learned(ranks, spec_of(corpus, **stored | flags), tmp_path / "run")
    longer = spec_of(corpus, **stored | {"train__steps": 2, "train__warmup_steps": 1})
    with pytest.raises(RanksFailedError, match=r"has no answer about sample \d+"):
        learned(ranks, longer, tmp_path / "longer")
    assert not (tmp_path / "longer" / "checkpoints").exists()
    file = out / FILES[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RanksFailedError, match=r"is damaged"):
        learned(ranks, spec_of(corpus, **stored), tmp_path / "run")
    (out / RECORD).unlink()
    with pytest.raises(UserError, match=r"was not written by"):
        api.train(spec_of(corpus, **stored), out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model__vocab_size": 301}, r"has a vocabulary of 300 tokens, and the student one of 301"),
        ({"distil__hidden": 1.0}, r"hidden: 1.0 compares .* 48 channels and the student 32"),
        ({"distil__tp": 3, "layout__dp": 2}, r"distil.tp: 3 does not divide the 2 of .*try distil.tp = 2"),
        ({"layout__tp": 2, "train__batch_tokens": 16}, r"the teacher on dp=2 .* does not fit this run"),
        ({"distil__top_k": 300}, r"top_k: 300 is not below model.vocab_size = 300"),
        ({"distil__logits": "x"}, r"both are given"),
        ({"distil__teacher": "none"}, r"neither is given"),
        ({"distil__teacher": "none", "distil__logits": "x", "distil__hidden": 1.0}, r"hidden: 1.0 needs the"),
        ({"distil__teacher": "nowhere"}, r"nowhere is not there; give the folder of a trained model"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_one_sentence(
    corpus: Path, teacher: Path, flags: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        teacher_of(spec_of(corpus, **{"distil__teacher": teacher, "distil__top_k": 8, **flags}))


def test_predictions_that_count_no_teacher_are_refused(corpus: Path, teacher: Path) -> None:
    spec = spec_of(corpus, distil__teacher=teacher)
    predictions = (
        api.simulate,
        api.dryrun,
        lambda spec: api.plan(spec, "h100-sxm", gpus=1),
        lambda spec: api.explain(spec, cluster="h100-sxm"),
    )
    for predict in predictions:
        with pytest.raises(UserError, match=r"does not count a teacher"):
            predict(spec)
    for options in ({"precision": "run"}, {"through": "checkpoint"}):
        with pytest.raises(UserError, match=r"draws no teacher"):
            api.verify(spec, **options)
    with pytest.raises(UserError, match=r"a sweep is of the student's layouts"):
        api.sweep(spec, 2)
    refuse_other_models(spec_of(corpus), "plan")


def test_answers_over_the_whole_vocabulary_say_the_same_as_many_of_the_likeliest() -> None:
    """All tokens but one are told apart by k = V - 1: then the KL is that of the whole vocabulary."""
    from meshwright.model.chunked_cross_entropy import linear_cross_entropy
    from meshwright.model.soft_targets import SoftTargets
    from meshwright.spec.distil import DistilSpec

    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (5, 11))
    log_p = torch.log_softmax(torch.randn(5, 11, generator=draw, dtype=torch.float64), -1)
    order = log_p.argsort(-1, descending=True)
    targets = torch.tensor([1, 2, -100, 4, 5])
    for kind in ("forward_kl", "reverse_kl"):
        losses = []
        for top_k, values, indices in ((None, log_p, None), (10, log_p.gather(-1, order), order[:, :10])):
            how = DistilSpec(loss=kind, top_k=top_k, weight=0.5)
            losses.append(linear_cross_entropy(x, weight, targets, soft=SoftTargets(how, values, indices)))
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-12)


def test_a_copy_of_a_run_learns_rounding_from_the_run(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Without rounding it is its teacher, so the KL is 0; with rounded weights it is not, and falls."""
    wide: dict[str, object] = {
        **SHORT, "model__hidden": 64, "model__ffn": 128, "model__head_dim": 16, "model__init_std": 0.2,
        "train__lr": 4e-4,
    }  # fmt: skip
    plain = spec_of(corpus, checkpoint__every=4, **wide)
    start(ranks, plain, tmp_path / "plain")
    (tmp_path / "plain" / "run.json").write_text(json.dumps({"spec": plain.to_json()}))
    taught = {**wide, "train__steps": 30, "distil__teacher": tmp_path / "plain", "distil__weight": 1.0}

    def kl(name: str, **flags: object) -> float:
        if not (tmp_path / name).exists():
            shutil.copytree(tmp_path / "plain", tmp_path / name)
        found = learned(ranks, spec_of(corpus, **taught, **flags), tmp_path / name, "auto")
        assert found["val_loss"] > 1  # validation is cross entropy
        return float(found["loss"])

    assert abs(kl("same", train__stop_at=5)) < 1e-6
    first = kl("rounded", train__stop_at=5, precision__qat="int4")
    assert first > 1e-3
    assert kl("rounded", precision__qat="int4") < 0.7 * first
