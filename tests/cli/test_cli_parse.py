"""How words become a call: flags, values that start with '-', and a sentence for each mistake."""

from __future__ import annotations

import pytest

from meshwright.cli.main import find, main
from meshwright.cli.parser import Call, Verb, parse
from meshwright.spec import UserError
from meshwright.spec.load import from_tree


def verb(name: str) -> Verb:
    return find(*name.split())


def mistake(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        main(words)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_words_flags_and_keys_in_any_order() -> None:
    words = ["--train.lr", "1e-3", "run.toml", "--json", "--layout.dp=2", "--nproc", "2"]
    call = parse(verb("train"), words)
    assert call.words == ("run.toml",)
    assert call.overrides == [("train.lr", "1e-3"), ("layout.dp", "2")]
    assert call.json
    unset = dict.fromkeys(("cluster", "out", "resume", "nodes", "address", "rendezvous"))
    assert call.flags == {"nproc": "2", "quiet": False, "verify": False, "doctor": False} | unset


def test_a_short_name_is_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in (["spec", "check"], ["check"]):
        assert main([*words, "--model.preset", "tiny"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "OK" in said[0]


def test_values_may_start_with_a_dash() -> None:
    assert parse(verb("train"), ["--train.lr", "-1"]).overrides == [("train.lr", "-1")]
    assert parse(verb("train"), ["--train.lr=-1"]).overrides == [("train.lr", "-1")]
    assert parse(verb("train"), ["--train.lr", "-.5e-3"]).overrides == [("train.lr", "-.5e-3")]
    assert parse(verb("generate"), ["r", "--prompt=--x"]).flags["prompt"] == "--x"
    assert parse(verb("generate"), ["r", "--prompt", "a=b --c"]).flags["prompt"] == "a=b --c"


def test_a_switch_key_may_stand_alone() -> None:
    assert parse(verb("train"), ["--train.compile", "run.toml"]) == Call(
        ("run.toml",), parse(verb("train"), []).flags, [("train.compile", "true")]
    )
    assert parse(verb("train"), ["--data.pack", "false"]).overrides == [("data.pack", "false")]


def test_none_stands_for_a_table_of_keys() -> None:
    for words in (["--distil", "none"], ["--distil=none"]):
        assert parse(verb("train"), [*words, "run.toml"]).overrides == [("distil", "none")]
    kept = [("distil.teacher", "x"), ("distil", "none")]
    assert from_tree({}, kept).distil is None


def test_two_dashes_end_the_flags() -> None:
    assert parse(verb("train"), ["--", "--odd.toml"]).words == ("--odd.toml",)


def test_own_values_are_read_by_type() -> None:
    flags = parse(verb("generate"), ["r", "--prompt", "x", "--temperature", "0.5", "--top-k", "3"]).flags
    assert (flags["temperature"], flags["top_k"], flags["top_p"], flags["seed"]) == (0.5, 3, None, 0)


GOODPUT = ["goodput", "--step-seconds", "5", "--save-seconds", "9", "--restart-seconds", "60", "--mtbf-hours"]

MISTAKES = [
    (["trian"], ["'trian'", "did you mean 'train'"]),
    (["spec", "sho"], ["'spec sho'", "did you mean 'spec show'"]),
    (["--nproc", "2"], ["'--nproc'", "an option stands before any verb"]),
    (["checkpoint", "x"], ["'checkpoint x'", "the verbs are ls, verify"]),
    (["fly"], ["'fly'", "the verbs are init, train, doctor, verify"]),
    (["train", "--nprocs", "2"], ["--nprocs", "did you mean 'nproc'"]),
    (["train", "--lr", "2"], ["--lr", "did you mean '--train.lr'"]),
    (["train", "--layout", "2"], ["--layout", "--layout.dp VALUE"]),
    (["train", "-n", "2"], ["-n", "two dashes"]),
    (["train", "--nproc"], ["--nproc", "needs a value"]),
    (["train", "--nodes", "3:2"], ["--nodes: '3:2'", "at least 3 hosts and at most 2", "give 2:3"]),
    (["train", "--train.lr"], ["--train.lr", "needs a value"]),
    (["train", "--train.lr", "--json"], ["--train.lr", "needs a value", "--train.lr=VALUE"]),
    (["train", "--json=1"], ["--json", "no value"]),
    (["train", "--json", "--json"], ["--json", "twice"]),
    (["train", "--layout.dp", "2", "--layout.dp=1"], ["--layout.dp", "twice"]),
    (["train", "--out", ""], ["--out", "folder"]),
    (["train", "--train.compile", "maybe"], ["--train.compile", '"maybe"', "true or false"]),
    (["train", "--distil", "0.5"], ["--distil: is a table of keys", "or none"]),
    (
        ["merge", "a", "b", "--method", "linear", "--out", "c", "--weight", "nan,1"],
        ["'nan,1'", "a number is needed"],
    ),
    (["train", "--distil.weight", "0.5"], ["distil.teacher", "neither is given"]),
    (["distil", "--distil.teacher", "x"], ["--out", "is missing"]),
    (["distil", "--out", "x"], ["distil.teacher: is missing"]),
    (["train", "a.toml", "b.toml"], ["'b.toml'", "too many", "usage: meshwright train [RUN]"]),
    (["generate", ".", "--top-k", "1"], ["--prompt", "--prompts", "give one of them"]),
    (["generate", ".", "--prompt", "x", "--out", "f"], ["--out", "--prompts"]),
    (["generate", ".", "--prompt", "x"], ["neither a run's folder", "run.json"]),
    (["evaluate", "."], ["neither a run's folder", "run.json"]),
    (["evaluate", "/no/run"], ["/no/run", "does not exist"]),
    (["evaluate", ".", "--data", "x"], ["--data", "'x'", "a name and a path"]),
    (["evaluate", ".", "--step", "last"], ["--step", "'last'"]),
    (["generate", "--prompt", "x"], ["RUN", "missing", "usage: meshwright generate RUN"]),
    (["generate", "/no/run", "--prompt", "x"], ["/no/run", "does not exist"]),
    (["generate", "x", "--prompt", "x", "--top-k", "0"], ["--top-k", "'0'", "at least 1"]),
    (["generate", "x", "--prompt", "x", "--top-p", "1.5"], ["--top-p", "'1.5'", "above 0 and at most 1"]),
    (["generate", "x", "--prompt", "x", "--top-p", "0"], ["--top-p", "'0'", "above 0 and at most 1"]),
    (["generate", "x", "--prompt", "x", "--temperature", "nan"], ["--temperature", "'nan'"]),
    (["export", "x", "y", "--train.lr", "1"], ["--train.lr", "takes no keys"]),
    (["export", "x", "y", "--dtype", "float23"], ["--dtype", "'float23'", "did you mean 'float32'"]),
    (["checkpoint", "verify", "x", "--step", "-1"], ["--step", "'-1'", "at least 0"]),
    (["clusters", "h100-smx"], ["'h100-smx'", "did you mean 'h100-sxm'"]),
    (["clusters", "h100", "--count", "0"], ["--count", "'0'", "at least 1"]),
    (["clusters", "lost.json"], ["lost.json", "no hardware file"]),
    (["profile", "--out", "/no/such/folder/it.json"], ["--out", "/no/such/folder", "an existing folder"]),
    (["profile", "--out", "it.toml"], ["--out", "'it.toml'", "ends in .json"]),
    (["profile", "--nproc", "0"], ["--nproc", "'0'", "1 or more"]),
    (["profile", "--seconds", "0"], ["--seconds", "'0'", "from 1"]),
    (["simulate", "--weight", "3"], ["--weight", "without --forward", "give --forward MS"]),
    (["simulate", "--forward", "3", "--tflops", "100"], ["--tflops: 100", "--forward", "one of them"]),
    (["simulate", "--forward", "0"], ["--forward", "'0'", "above 0"]),
    (["simulate", "--bandwidth", "inf"], ["--bandwidth", "'inf'", "above 0"]),
    (["simulate", "--latency", "-1"], ["--latency", "'-1'", "from 0"]),
    (["simulate", "--out", ""], ["--out", "file"]),
    (["simulate", "--out", "x.pdf"], ["--out", "'x.pdf'", "ends in .html", "such as step.html"]),
    (["simulate", "--out", "step"], ["--out", "'step'", "ends in .html"]),
    (["simulate", "--trace", "x.html"], ["--trace", "'x.html'", "ends in .json", "such as step.json"]),
    (["simulate", "--out", "/no/such/folder/step.html"], ["/no/such/folder/step.html"]),
    (["simulate", "--layout.pp", "9"], ["layout.pp", "9 stages", "model.layers = 4", "try layout.pp = 6"]),
    (["simulate", "--layout.pp", "2", "--layout.schedule", "zb"], ["--layout.schedule", '"zb"', "'zb-v'"]),
    (["goodput", "--step-seconds", "0"], ["--step-seconds", "'0'", "from 1e-06"]),
    (["goodput", "--save-seconds=-1"], ["--save-seconds", "'-1'", "from 0"]),
    (
        ["goodput", "--step-seconds", "5", "--mtbf-hours", "3"],
        ["--save-seconds", "is missing", "give --save-seconds S, or the --chaos report"],
    ),
    (
        ["goodput", "--step-seconds", "5", "--mtbf-hours", "3", "--chaos", "gone.json"],
        ["--chaos", "gone.json", "cannot be read"],
    ),
    ([*GOODPUT, "nan"], ["--mtbf-hours", "'nan'", "from 1e-06"]),
    (GOODPUT[:-1], ["--mtbf-hours: is missing", "--device-mtbf-hours and --devices"]),
    ([*GOODPUT, "3", "--device-mtbf-hours", "5"], ["--device-mtbf-hours: 5", "together with --mtbf-hours"]),
    ([*GOODPUT, "0.0001"], ["--restart-seconds: 60 ", "50 times the 0.36 s"]),
    ([*GOODPUT, "3", "--tokens", "1e12"], ["--tokens: 1T", "give --batch-tokens too"]),
    ([*GOODPUT, "3", "--tokens", "inf"], ["--tokens", "'inf'", "at least 1"]),
    ([*GOODPUT, "3", "--tokens", "15X"], ["--tokens", "'15X'", "such as 16M"]),
    ([*GOODPUT, "3", "--tokens", "0T"], ["--tokens", "'0T'", "at least 1"]),
    ([*GOODPUT, "3", "--batch-tokens", "1.5"], ["--batch-tokens", "'1.5'", "a whole number"]),
    ([*GOODPUT, "3", "--every", "1000000"], ["--every: ", "10800 s", "well below"]),
    ([*GOODPUT, "3", "--runs", "10000000"], ["--runs: 10000000 ", "would take too long"]),
    ([*GOODPUT[:-1], "--device-mtbf-hours", "5"], ["--devices: is missing", "--device-mtbf-hours is"]),
    (["validate", "/no/runs.csv"], ["/no/runs.csv", "there is no such file"]),
    ([*GOODPUT, "3", "--runs", "1"], ["--runs", "'1'", "at least 2"]),
    (["verify", "--steps", "two"], ["--steps", "'two'", "whole number"]),
]


@pytest.mark.parametrize(("words", "parts"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_a_sentence_with_what_would_work(words: list[str], parts: list[str]) -> None:
    text = mistake(*words)
    for part in parts:
        assert part in text


SPEC_MISTAKES = [
    (["--train.stpes", "3"], ["--train.stpes", "unknown key", "did you mean 'train.steps'"]),
    (["--train.lr=-1"], ["--train.lr: -1", "greater than 0"]),
    (["--layout.dp", "3", "--train.batch_tokens", "7680", "--nproc", "4"], ["dp=3", "4 were", "--nproc 3"]),
    (["--model.kv_heads", "3"], ["--model.kv_heads: 3", "model.heads = 8", "try 4"]),
    (["--nproc", "many"], ["--nproc", "'many'", "auto"]),
    (["gone.toml"], ["gone.toml"]),
]


@pytest.mark.parametrize("name", ["train", "verify", "spec check", "spec show"])
@pytest.mark.parametrize(
    ("words", "parts"), SPEC_MISTAKES, ids=[" ".join(words) for words, _ in SPEC_MISTAKES]
)
def test_a_mistake_in_the_spec_stops_every_verb_before_it_starts(
    name: str, words: list[str], parts: list[str]
) -> None:
    text = mistake(*name.split(), *words)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["tokenize", "--out", "x", "--special-tokens", "read"], "--data.special_tokens"),
        (["train", "--special-tokens", "read"], "--data.special_tokens"),
        (["train", "--batch-tokens=512"], "--train.batch_tokens"),
        (["generate", "x", "--prompt", "a", "--data.special_tokens", "read"], "--special-tokens"),
        (["evaluate", "x", "--data.special_tokens=read"], "--special-tokens"),
        (["import", "x", "--model.out", "y"], "--out"),
    ],
)
def test_a_flag_of_another_verb_points_at_the_key_and_back(words: list[str], meant: str) -> None:
    assert mistake(*words).endswith(f"; did you mean '{meant}'?")
