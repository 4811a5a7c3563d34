"""`meshwright init` for chats: a run file that tunes a model, with lengths, passes and adapters that suit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import transformers
from chat_models import chats, model_in, pair_rows, written

from meshwright import api
from meshwright.api.run_files import places
from meshwright.api.run_files.holdings import holding
from meshwright.cli import main as command_line
from meshwright.cli.parser import parse
from meshwright.data.corpus import open_corpus
from meshwright.hardware.catalogue import host
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.load import Overrides
from meshwright.spec.sections import DataSpec

ONE = [("layout.dp", "1"), ("data.cache", "cache")]


@pytest.fixture
def have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """300 chats and a model of 36,000 parameters, on a machine of 2 cores with 8 GB."""
    monkeypatch.setattr(places, "present", lambda: host("a processor", 2, 8 << 30))
    monkeypatch.setattr(places, "count_devices", lambda: 2)
    monkeypatch.chdir(tmp_path)
    model_in(tmp_path / "model")
    written(chats(1, 300), tmp_path / "chats.jsonl")
    return ["chats.jsonl", "model"]


def made(have: list[str], *keys: tuple[str, str], want: str | None = None) -> RunSpec:
    """The run of a file that `init` writes."""
    Path("run.toml").unlink(missing_ok=True)
    api.init(have, want, overrides=[*ONE, *keys])
    return load(Path("run.toml"))


def test_chats_and_a_model_become_a_run_that_tunes_it(have: list[str]) -> None:
    told = api.init(have, overrides=ONE)
    spec = load(Path("run.toml"))
    assert (spec.model.hf, spec.data.corpus, spec.data.pack) == ("model", "chats.jsonl", True)
    assert (spec.data.val_fraction, spec.train.weight_decay, spec.train.lr) == (0.05, 0, 2e-5)
    assert told["found"][0] == "chats.jsonl: chats, by the keys of its first row: messages"
    assert told["told"][0].startswith("300 chats, in about ")
    corpus = open_corpus(load(Path("run.toml"), [("data.val_fraction", "0")]))
    assert f"about {corpus.train.samples} samples" in told["told"][0]
    passes = spec.train.total_steps * spec.batch_sequences / corpus.train.samples
    assert passes == pytest.approx(3, rel=0.05)
    result = api.train(load(Path("run.toml"), [("train.steps", "2")]), out=Path("runs/run"), quiet=True)
    assert result["val_loss"] > 0


def test_samples_take_all_but_the_longest_chats(have: list[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    rows = [row["messages"] for row in chats(1, 300)]
    tokens = [len(tokenizer.apply_chat_template(row, return_dict=False)) for row in rows]
    longest = "word " * 200
    rows.append([{"role": "user", "content": longest}, {"role": "assistant", "content": "one"}])
    written([{"messages": row} for row in rows], Path("chats.jsonl"))
    seq_len = made(have).data.seq_len
    assert np.quantile(tokens, 0.99) <= seq_len <= np.quantile(tokens, 0.99) + 64 < 256
    assert made(have, ("data.seq_len", "96")).data.seq_len == 96


def test_a_model_that_is_large_for_the_machine_gets_adapters(
    have: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made(have).lora is None
    assert (adapted := made(have, ("lora.rank", "4"))).lora is not None
    assert (adapted.lora.rank, adapted.train.lr) == (4, 2e-4)
    monkeypatch.setattr(places, "present", lambda: host("a processor", 2, 1 << 20))
    spec = made(have)
    assert spec.lora is not None and (spec.lora.rank, spec.lora.alpha, spec.train.lr) == (16, 32, 2e-4)
    assert "adapters (Hu et al. 2021), since the weights of 36.13k" in Path("run.toml").read_text()
    for spec in (made(have, ("lora", "none")), made(have, want="continue")):
        assert (spec.lora, spec.train.lr) == (None, 2e-5)


def test_given_lengths_are_kept(have: list[str]) -> None:
    assert made(have, ("train.steps", "7")).train.total_steps == 7
    spec = made(have, ("train.tokens", "4000"), ("data.seq_len", "128"), ("train.batch_tokens", "1024"))
    assert (spec.train.total_steps, spec.batch_sequences) == (4, 8)


def test_few_chats_are_not_held_out(have: list[str]) -> None:
    written(chats(1, 12), Path("chats.jsonl"))
    spec = made(have)
    assert (spec.data.val_fraction, spec.train.eval_every) == (0, 0)


def test_every_command_is_one(have: list[str]) -> None:
    commands = [command for command, _ in api.init(have, overrides=ONE)["commands"]]
    assert [shlex.split(command)[1] for command in commands] == [
        "spec", "data", "train", "generate", "export",
    ]  # fmt: skip
    for command in commands:
        words = shlex.split(command)[1:]
        length = 2 if words[0] in ("spec", "data") else 1
        assert parse(command_line.find(*words[:length]), words[length:]) is not None


def test_a_layout_for_a_cluster_is_planned_for_any_length(have: list[str]) -> None:
    api.init(have, on="h100-sxm", gpus=2, overrides=[("data.seq_len", "192")])
    spec = load(Path("run.toml"))
    assert spec.layout.world_size == 2 and spec.data.seq_len == 192 and spec.precision.compute == "bf16"


def test_a_run_on_chats_goes_on_with_them(have: list[str]) -> None:
    rows = [{"conversations": row["messages"]} for row in chats(1, 60)]
    written(rows, Path("rows.jsonl"))
    (Path("model") / "chat_template.jinja").rename("own.jinja")
    keys = [("data.format", "sharegpt"), ("data.chat_template", "own.jinja"), ("train.steps", "1")]
    api.train(made(["rows.jsonl", "model"], *keys), out=Path("runs/first"), quiet=True)
    spec = made(["runs/first"], want="finetune")
    assert (spec.model.weights, spec.data.corpus) == ("runs/first", "rows.jsonl")
    assert (spec.data.format, spec.data.chat_template) == ("sharegpt", "own.jinja")


def test_pairs_and_columns_that_are_named_become_runs(have: list[str]) -> None:
    written(pair_rows(1, 40), Path("pairs.jsonl"))
    loss = [("preference.loss", "dpo"), ("lora.rank", "4")]
    spec = made(["pairs.jsonl", "model"], *loss)
    assert spec.preference is not None and spec.preference.loss == "dpo"
    corpus = open_corpus(spec)
    assert corpus.pairs == [True] and 2 * 36 <= corpus.train.documents <= 2 * 40
    assert not any(side.cut_documents for side in corpus.train.sides)  # both answers fit into a sample
    written([{"question": "one", "answer": "two", "n": n} for n in range(30)], Path("qa.jsonl"))
    named = [("data.columns.instruction", "question"), ("data.columns.output", "answer")]
    spec = made(["qa.jsonl", "model"], *named)
    assert spec.data.columns == {"instruction": "question", "output": "answer"}
    api.train(load(Path("run.toml"), [("train.steps", "1")]), out=Path("runs/qa"), quiet=True)
    assert made(["runs/qa"], want="finetune").data.columns == spec.data.columns


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"instruction": "Say hello", "output": "Hello"}, "instruction and output"),
        ({"prompt": "One and one?", "completion": "two"}, "prompt and completion"),
        ({"conversations": [{"from": "human", "value": "?"}]}, "conversations"),
    ],
)
def test_chats_are_told_by_the_keys_of_their_rows(
    row: dict[str, object], keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written([row], Path("rows.json"))
    found = holding("rows.json")
    assert (found.kind, found.told) == ("chats", f"chats, by the keys of its first row: {keys}")
    assert holding("hf:org/data").kind == "text"
    assert holding("hf:org/data", DataSpec(format="alpaca")).kind == "chats"


@pytest.mark.parametrize(
    ("names", "want", "sentence"),
    [
        (["chats.jsonl"], None, "chats need a model to tune; give one more --have, such as Qwen"),
        (["chats.jsonl", "model"], "train", "a chat template, and --want finetune"),
        (["silent.jsonl", "model"], None, "--have: silent.jsonl has no chat with an answer to train on"),
        (["pairs.jsonl", "model"], None, "need a loss of pairs; give --preference.loss dpo with --lora.rank"),
        (
            ["qa.jsonl", "model"],
            None,
            "with --data.columns.instruction question --data.columns.output answer",
        ),
        (["chats.jsonl", "untold"], None, "data.tokenizer: its folder has no chat template"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    have: list[str], names: list[str], want: str | None, sentence: str
) -> None:
    written([{"messages": [{"role": "user", "content": "Hello?"}]}], Path("silent.jsonl"))
    written(pair_rows(1, 9), Path("pairs.jsonl"))
    written([{"question": "one", "answer": "two"}], Path("qa.jsonl"))
    model_in(Path("untold"))
    (Path("untold") / "chat_template.jinja").unlink()
    overrides: Overrides = ONE
    with pytest.raises(UserError) as caught:
        api.init(names, want, overrides=overrides)
    assert sentence in str(caught.value), caught.value
    assert not Path("run.toml").exists()


def test_comments_say_why(have: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--have", "chats.jsonl", "--have", "model", "--layout.dp", "1"]
    assert command_line.main(["init", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "run.toml"
    text = Path("run.toml").read_text()
    assert "fine-tuned on chats.jsonl" in text and "of 3 that are usual (Taori et al. 2023)" in text
