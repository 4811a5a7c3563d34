"""`train.epochs`: a run of so many passes is that of the steps that they take, to the bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from meshwright import api
from meshwright.api.engine_spec import check_runnable
from meshwright.cli.main import main
from meshwright.data.corpus import open_corpus
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import from_tree
from ranks import Ranks
from training_runs import go_on, spec_of, start


def with_epochs(spec: RunSpec, epochs: float) -> RunSpec:
    tree = spec.to_json()
    tree["train"] |= {"epochs": epochs, "steps": None}
    return RunSpec.model_validate(tree)


def test_epochs_are_the_steps_that_their_samples_take(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    samples = open_corpus(spec_of(corpus)).train.samples
    steps = math.ceil(0.04 * samples / 8)
    assert 3 < steps < 80
    spec = spec_of(corpus, layout__dp=2, train__steps=steps)
    passes = with_epochs(spec, 0.04)
    (wanted, parameters), (found, own) = (
        start(ranks, each, tmp_path / name) for each, name in ((spec, "steps"), (passes, "epochs"))
    )
    assert found["steps"] == steps and found["parameters_sha256"] == wanted["parameters_sha256"]
    assert all((own[name] == parameter).all() for name, parameter in parameters.items())


def test_a_run_of_epochs_goes_on_from_its_checkpoint(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = with_epochs(spec_of(corpus, checkpoint__every=5, checkpoint__keep=9), 0.04)
    whole, _ = start(ranks, spec, tmp_path / "run")
    again, _ = go_on(ranks, spec, tmp_path / "run")
    assert again["parameters_sha256"] == whole["parameters_sha256"]


def test_each_sample_is_seen_once_in_an_epoch_of_a_growing_batch(corpus: Path) -> None:
    warmup = spec_of(corpus, train__batch_warmup="64:640")
    for epochs, samples in ((1, 100), (2.5, 77), (0.001, 8)):
        train = with_epochs(warmup, epochs).counted(samples).train
        wanted = math.ceil(epochs * samples) * 16
        assert train.epochs is None and train.steps is not None
        assert train.tokens_after(train.steps - 1) < wanted <= train.tokens_after(train.steps)


def test_the_record_has_steps(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.train(with_epochs(spec_of(corpus), 0.01), out=tmp_path / "run", quiet=True)
    train = load(tmp_path / "run").train
    assert train.epochs is None and train.steps is not None and train.steps < 20
    assert main(["spec", "check", "--train.epochs", "3", "--model.preset", "tiny", "--layout.dp", "1"]) == 0
    assert "3 epochs of 8,192 tokens" in capsys.readouterr().out


def test_a_flag_takes_the_place_of_the_files_length() -> None:
    for key in ("steps", "tokens", "epochs"):
        for other in {"steps", "tokens", "epochs"} - {key}:
            assert getattr(from_tree({"train": {key: 7}}, [(f"train.{other}", "5")]).train, key) is None


@pytest.mark.parametrize(
    ("train", "others", "sentence"),
    [
        ({"epochs": 2, "steps": 5}, {}, "train.epochs: 2.0 is given together with train.steps = 5"),
        ({"epochs": 0}, {}, "train.epochs: 0 is not valid"),
        ({"epochs": 2}, {"layout": {"replicate": 2, "zero": 1}, "outer": {"every": 4}},
         "outer.every = 4 needs the steps before; give train.steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(train: dict[str, object], others: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        from_tree({"train": train, **others})
    assert sentence in str(caught.value), caught.value


def test_rules_on_steps_hold_once_they_are_counted(corpus: Path) -> None:
    spec = with_epochs(spec_of(corpus), 1)
    late = RunSpec.model_validate(
        {**spec.to_json(), "train": {**spec.to_json()["train"], "warmup_steps": 50}}
    )
    with pytest.raises(UserError, match=r"train.warmup_steps: 50 is more than the number of steps = 5"):
        late.counted(40)
    with pytest.raises(UserError, match=r"train.epochs: 1 cannot be counted, as an engine reads no corpus"):
        check_runnable(spec)
