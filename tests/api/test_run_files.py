"""Run files for what somebody has: they load, plan and train, and every command that is named is one."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.api.run_files import places
from meshwright.api.run_files.budget import DAY, SIZES, TOKENS_PER_PARAMETER, UTILISATION, preset_for
from meshwright.api.run_files.draft import Draft
from meshwright.api.run_files.holdings import holding
from meshwright.api.run_files.new_run_file import WANTS
from meshwright.api.run_files.places import place
from meshwright.cli import main as command_line
from meshwright.cli.main import main
from meshwright.cli.parser import parse
from meshwright.hardware.catalogue import host
from meshwright.rank.device_defaults import with_device_defaults
from meshwright.spec import ModelSpec, UserError, load
from meshwright.spec.load import from_tree, read_tree

TEXT = "A run file says what is trained, on what, and where. " * 400
SMALL = {
    "model.layers": "1", "model.hidden": "32", "model.ffn": "48", "model.heads": "2", "model.kv_heads": "1",
    "model.vocab_size": "300", "data.seq_len": "32", "train.batch_tokens": "256", "train.tokens": "1024",
    "layout.dp": "1",
}  # fmt: skip
"""Keys of a model and a run that take a second."""


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text in the working directory, on a machine without GPUs."""
    monkeypatch.setattr(places, "present", lambda: host("a processor", 2, 8 << 30))
    monkeypatch.setattr(places, "count_devices", lambda: 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "my-text"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(text: Path) -> Path:
    """The folder of a run that was trained from a file of `init`."""
    api.init(["my-text"], out=Path("first.toml"), overrides=[*SMALL.items(), ("data.cache", "cache")])
    api.train(load(Path("first.toml")), out=Path("runs/first"), quiet=True)
    return Path("runs/first")


def _accepted(command: str) -> bool:
    """True if the command line takes all words of a command; `UserError` says which one it does not."""
    words = shlex.split(command)[1:]
    length = 2 if words[0] == "spec" else 1
    verb = command_line.find(*words[:length])
    return parse(verb, words[length:]) is not None


def test_a_text_becomes_a_run_that_trains_and_is_continued(run: Path) -> None:
    spec = load(run)
    assert (spec.data.corpus, spec.model.preset, spec.checkpoint.every) == ("my-text", "tiny", "auto")
    assert spec.train.total_steps == 4 and (run / "report.html").is_file()
    made = api.init([str(run), "my-text"], out=Path("more.toml"), overrides=[("layout.dp", "1")])
    again = load(Path("more.toml"))
    assert made["file"] == "more.toml" and again.model.weights == str(run)
    assert again.model.hidden == 32 and again.train.lr < spec.train.lr


def test_a_run_alone_goes_on_with_its_own_text(run: Path) -> None:
    made = api.init([str(run)], "continue", out=Path("more.toml"), overrides=[("layout.dp", "1")])
    assert load(Path("more.toml")).data.corpus == "my-text"
    assert load(Path("more.toml")).data.seq_len == 32
    assert any("train more.toml" in command for command, _ in made["commands"])


def test_the_file_is_valid_and_says_why(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--have", "my-text", "--train.lr", "1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "my-text: 21.2 KB of text" in shown and "wrote run.toml" in shown
    written = Path("run.toml").read_text()
    assert "A new model of the shape tiny" in written and "passes over the text" in written
    assert load(Path("run.toml")).train.lr == 1e-3
    assert main(["spec", "check", "run.toml"]) == 0


def test_a_layout_for_a_cluster_is_the_planners(text: Path) -> None:
    made = api.init(["my-text"], on="h100-sxm", gpus=16, preset="base", out=Path("c.toml"))
    path = Path("c.toml")
    spec = load(path, with_device_defaults(read_tree(path), [], "cuda"))
    best = api.plan("c.toml", "h100-sxm", gpus=16, top=1).best.spec
    assert spec.layout == best.layout and spec.recompute == best.recompute
    assert spec.layout.world_size == 16 and spec.precision.compute == "bf16"
    assert any("--nodes 2" in command for command, _ in made["commands"])
    assert any("predicted for 16 x H100" in sentence for sentence in made["told"])


@pytest.mark.parametrize("want", [want for want in WANTS if want != "train"])
def test_every_command_is_one(run: Path, want: str) -> None:
    have = [str(run)] if want == "serve" else [str(run), "my-text"]
    made = api.init(have, want, out=Path("x.toml"), overrides=[("layout.dp", "1")])
    assert (made["file"] is None) == (want == "serve")
    assert all(_accepted(command) for command, _ in made["commands"])


def test_commands_of_an_hf_folder_and_of_the_hub_are_commands(text: Path) -> None:
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("model", "org/name"):
        commands = [command for command, _ in api.init([name], "serve")["commands"]]
        ours = [command for command in commands if command.startswith("meshwright ")]
        assert len(ours) == 5 and all(_accepted(command) for command in ours)
    assert commands[0] == "hf download org/name --local-dir hf/name"


def test_the_size_follows_from_the_text_and_from_a_day_of_the_devices(text: Path) -> None:
    assert preset_for(10_000, place("h100-sxm", 8)) == SIZES[0]
    sizes = [SIZES.index(preset_for(None, place("h100-sxm", gpus))) for gpus in (1, 8, 64, 1024)]
    assert sizes == sorted(sizes) and len(set(sizes)) >= 3
    for gpus in (8, 64):
        where = place("h100-sxm", gpus)
        parameters = ModelSpec.model_validate({"preset": preset_for(None, where)}).parameters
        assert 6 * parameters * TOKENS_PER_PARAMETER * parameters <= UTILISATION * where.flops * DAY


def test_a_draft_has_lists_comments_and_keys_as_a_run_file_has() -> None:
    draft = Draft(["word " * 40])
    draft.add("model.preset", "tiny")
    draft.add("recompute.policy", "selective", "reason " * 40)
    draft.add("recompute.save", ["attention", "matmul"])
    draft.add_table("layout", {"dp": 1, "pp": 2, "stages": [3, 1]}, {"dp": 1}, "why")
    read = tomllib.loads(draft.toml())
    assert read["recompute"] == {"policy": "selective", "save": ["attention", "matmul"]}
    assert read["layout"] == {"pp": 2, "stages": [3, 1]}
    assert max(map(len, draft.toml().splitlines())) <= 100


def test_given_keys_are_what_all_else_follows_from(text: Path) -> None:
    flags = {"data.seq_len": "512", "train.tokens": "20000000000", "train.batch_tokens": "65536"}
    api.init(["my-text"], preset="base", out=Path("a.toml"), overrides=[*flags.items()])
    spec = load(Path("a.toml"))
    assert (spec.data.seq_len, spec.train.tokens, spec.train.batch_tokens) == (512, 20_000_000_000, 65536)
    assert spec.train.lr == pytest.approx(1.3e-3, rel=0.02)  # 0.3118 x (6 x 8.8e7 x 2e10) ^ -0.125
    api.init(["my-text"], out=Path("b.toml"), overrides=[("train.steps", "30")])
    assert load(Path("b.toml")).train.total_steps == 30
    api.init(["my-text"], preset="llama3-8b", out=Path("c.toml"))
    assert load(Path("c.toml")).train.lr == 3e-4
    with pytest.raises(UserError, match=r"--data.corpus: stdlib is given together with --have my-text"):
        api.init(["my-text"], out=Path("d.toml"), overrides=[("data.corpus", "stdlib")])


def test_a_given_layout_is_kept_and_the_rest_planned_for_all_devices(text: Path) -> None:
    api.init(
        ["my-text"], on="h100-sxm", gpus=8, preset="base", out=Path("a.toml"), overrides=[("layout.tp", "2")]
    )
    layout = load(Path("a.toml")).layout
    assert layout.tp == 2 and layout.world_size == 8


def test_a_run_goes_on_with_the_rows_that_it_has_read(text: Path) -> None:
    _rows("rows.jsonl", [{"words": TEXT}, {"words": TEXT + "again"}])
    keys = [*SMALL.items(), ("data.cache", "cache"), ("data.text_key", "words")]
    api.init(["rows.jsonl"], out=Path("first.toml"), overrides=keys)
    api.train(load(Path("first.toml")), out=Path("runs/rows"), quiet=True)
    api.init(["runs/rows"], "continue", out=Path("more.toml"), overrides=[("layout.dp", "1")])
    assert load(Path("more.toml")).data.text_key == "words"


def test_bytes_that_are_no_text_do_not_count(text: Path) -> None:
    before = holding("my-text").tokens
    (text / "picture.jpg").write_bytes(bytes(1_000_000))
    assert holding("my-text").tokens == before
    (text / "b.txt").write_text(TEXT)
    assert holding("my-text").tokens == 2 * (before or 0)


def test_one_document_is_told_and_not_validated_on(text: Path) -> None:
    made = api.init(["my-text"], out=Path("one.toml"))
    assert "in one document" in made["found"][0] and load(Path("one.toml")).train.eval_every == 0
    assert "none is held out" in Path("one.toml").read_text()
    (text / "b.txt").write_text(TEXT)
    made = api.init(["my-text"], out=Path("two.toml"))
    assert "in one document" not in made["found"][0] and load(Path("two.toml")).train.eval_every > 0


def test_a_text_of_two_letters_is_a_text(text: Path) -> None:
    Path("tiny.txt").write_text("hi")
    api.init(["tiny.txt"], out=Path("tiny.toml"))
    assert load(Path("tiny.toml")).train.total_steps > 0


def test_names_with_quotation_marks_can_be_pasted(text: Path) -> None:
    made = api.init(["my-text"], out=Path("it's.toml"))
    assert all(_accepted(command) for command, _ in made["commands"])


def _rows(name: str, rows: list[Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def _file(name: str, content: str) -> str:
    Path(name).write_text(content)
    return name


def _unsaved(name: str) -> str:
    """A run's folder that has a record and no checkpoint."""
    Path(name).mkdir()
    (Path(name) / "run.json").write_text(json.dumps({"spec": from_tree({}).to_json()}))
    return name


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("make", "words", "sentence"),
    [
        (list, (), "--have: is missing; give a text, a model or a run"),
        (lambda: ["my-texts"], (), "--have: my-texts is not there; did you mean 'my-text'?"),
        (lambda: ["llama3-8b"], (), "has no weights; give it as --preset llama3-8b"),
        (lambda: ["my-text", "stdlib"], (), "give one text; several texts are the table [data.mixture]"),
        (lambda: ["my-text"], ("serve",), "--want: serve needs a model or a run"),
        (lambda: [_rows("chats.jsonl", [CHAT])], (), "messages, and chats need a model to tune"),
        (lambda: ["my-text"], (None, "h100-sx"), "did you mean 'h100-sxm'?"),
        (lambda: ["my-text"], (None, "here", 4), "--gpus: 4 are asked for, and this machine has none"),
        (lambda: ["my-text"], (None, "here", None, "tinny"), "--preset: 'tinny' is not the name of a preset"),
        (lambda: [_rows("rows.jsonl", [{"content": "x"}])], (), "has no key 'text'"),
        (lambda: [_rows("rows.jsonl", [{"text": ""}])], (), "--have: rows.jsonl holds no text"),
        (lambda: [_file("ax.yml", "base_model: x")], (), "--have: ax.yml is a file of settings, not of text"),
        (lambda: [""], (), "--have: '' names nothing"),
        (lambda: ["my-text", _file("b.txt", "b")], (), "b.txt is text, and my-text is text, too"),
        (lambda: [_unsaved("a-run")], (), "--have: a-run is a run without any checkpoint"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_writes_nothing(
    text: Path, make: Callable[[], list[str]], words: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        api.init(make(), *words, out=Path("new.toml"))
    assert sentence in str(caught.value)
    assert not Path("new.toml").exists()


def test_nothing_is_replaced(text: Path) -> None:
    Path("run.toml").write_text("mine")
    with pytest.raises(UserError, match=r"FILE: run.toml is there already"):
        main(["init", "--have", "my-text"])
    assert Path("run.toml").read_text() == "mine"


def test_what_there_is_is_told_by_its_files(text: Path) -> None:
    Path("shards.txt").write_text("words")
    assert holding("shards.txt").kind == "text" and (holding("stdlib").tokens or 0) > 1e6
    assert holding("org/name").kind == "model"
    _rows("chats.jsonl", [CHAT])
    assert holding("chats.jsonl").kind == "chats"
    api.tokenize("my-text", "byte", Path("tokens"), vocab_size=300)
    tokens = holding("tokens")
    assert (tokens.kind, tokens.tokens) == ("text", len(TEXT) + 1)


def test_a_terminal_is_asked(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text.parent / "my text").mkdir()
    (text.parent / "my text" / "a.txt").write_text(TEXT)
    answers = iter(["my", "'my text'", "learn", "train", "h100-sxm zero", "h100 8x", "h100-sxm 8"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["init", "asked.toml"]) == 0
    spec = load(Path("asked.toml"))
    assert spec.layout.world_size == 8 and spec.data.corpus == "my text"
    assert not list(answers)  # a wrong answer is told, and asked for again
    with pytest.raises(UserError, match="is there already"):  # before any question
        main(["init", "asked.toml"])
