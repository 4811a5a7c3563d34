"""An engine joins the world that is there, or makes one, and leaves it as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshwright
from engine_cases import TRAIN, VOCAB, own_rows, spec_of, whole_batch
from hf_models import CASES, save_theirs
from meshwright.api.engine import Engine
from meshwright.spec import RunSpec, UserError
from meshwright.testing import run_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_theirs(made / "float32", *CASES["llama"]).double().save_pretrained(made / "hf")
    return made / "hf"


def first_loss(engine: Engine) -> float:
    loss: float = engine.forward_backward(own_rows(whole_batch(), engine.data_rank, engine.data_ranks))[
        "loss"
    ]
    engine.step()
    return loss


def test_it_joins_the_process_group_that_is_there_and_stays_in_it(folder: Path) -> None:
    alone = Engine(spec_of(folder, {}))
    wanted = first_loss(alone)
    alone.close()
    assert not dist.is_initialized()
    found = run_on_ranks(2, joined, spec_of(folder, {"dp": 2, "zero": 3}), folder)
    assert found == [pytest.approx(wanted, rel=1e-12)] * 2


def joined(spec: RunSpec, folder: Path) -> float:
    every = dist.new_group([0, 1])
    part = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    with pytest.raises(UserError, match="group: has 1 of the 2 ranks"):
        Engine(spec, part)
    with pytest.raises(UserError, match=r"layout: .* is 1 rank, but 2 were asked for"):
        Engine(spec_of(folder, {}))
    with Engine(spec, every) as engine:
        found = first_loss(engine)
    total = torch.ones(1)
    dist.all_reduce(total)  # the group is as it was
    assert total.item() == 2
    pretrained = Engine.from_pretrained(folder, precision__compute="fp64", layout__tp=2)
    assert pretrained.spec.layout.tp == 2 and pretrained.spec.layout.dp == 1
    assert first_loss(pretrained) == pytest.approx(found, rel=1e-12)
    pretrained.close()
    return found


def test_a_pretrained_model_takes_dotted_keys_and_a_run_file_its_own(folder: Path, tmp_path: Path) -> None:
    keys = {"precision.compute": "fp64", "train__lr": 0.5, "train.schedule": "constant", "train.ema": None}
    with Engine.from_pretrained(folder, **keys) as engine:  # type: ignore[arg-type]
        assert engine.spec.train.lr == 0.5 and engine.spec.train.ema is None
        assert engine.spec.model.vocab_size == VOCAB
        found = first_loss(engine)
    tables: dict[str, list[str]] = {"model": [f'hf = "{folder}"']}
    for key, value in TRAIN.items():
        table, name = key.split(".")
        tables.setdefault(table, []).append(f"{name} = {value!r}".replace("'", '"'))
    text = "\n".join(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items())
    (tmp_path / "run.toml").write_text(text)
    with meshwright.Engine(tmp_path / "run.toml") as engine:
        assert first_loss(engine) == pytest.approx(found, rel=1e-12)
    with pytest.raises(UserError, match=r"from_pretrained: .* is not there"):
        Engine.from_pretrained(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"outer.every": 2, "layout.replicate": 2}, "outer: with it a step uses gradients later, or lets"),
        (
            {"distil.teacher": "runs/teacher"},
            "distil: with it a step learns from a teacher, and an engine",
        ),
    ],
)
def test_runs_that_need_more_than_batches_are_refused(
    folder: Path, keys: dict[str, object], message: str
) -> None:
    named = {name.replace(".", "__"): value for name, value in keys.items()}
    with pytest.raises(UserError, match=message):
        Engine(spec_of(folder, {}, **named))


def test_a_process_that_does_not_close_it_ends_quietly(folder: Path) -> None:
    program = (
        "import sys; from meshwright import Engine; import torch\n"
        "engine = Engine.from_pretrained(sys.argv[1])\n"
        "print(engine.forward_backward({'input_ids': torch.arange(8)[None]})['count'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0 and ended.stdout == "7.0\n", ended.stderr
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr, ended.stderr
