"""The output of verbs for people stays within 100 columns, and holds no control characters."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from stand_ins import stand_in

from meshwright import api
from meshwright.cli import evaluate
from meshwright.cli import output as show
from meshwright.cli.dryrun import _kernels
from meshwright.cli.main import main
from meshwright.hardware.cluster import Collective, Matmul, ProfiledTimes
from meshwright.hardware.find import cluster
from meshwright.hardware.hardware_file import write
from meshwright.rank import auto_layout as choose
from meshwright.spec import RunSpec, UserError

MOE = [
    "--model.preset", "deepseek-v3", "--layout.replicate", "2", "--layout.dp", "16", "--layout.cp", "4",
    "--layout.tp", "8", "--layout.pp", "8", "--layout.ep", "32", "--layout.schedule", "interleaved",
    "--layout.virtual", "4", "--layout.context_mode", "ring+ulysses", "--data.seq_len", "4096",
    "--train.batch_tokens", "16777216", "--layout.zero", "2", "--layout.micro_batch", "1",
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= show.WIDTH
    return lines


def test_a_long_last_cell_goes_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    show.table([{"#": 1, "layout": "word " * 40}, {"#": 2, "layout": "short"}])
    lines = printed(capsys)
    assert sum(line.count("word") for line in lines) == 40
    assert lines[0].split() == ["#", "layout"] and all(line[:3] == "   " for line in lines[2:4])


def test_the_widest_columns_are_narrowed_first(capsys: pytest.CaptureFixture[str]) -> None:
    cells = {"part": "blocks.0, " * 10, "each": "1.5 GiB", "of which": "zb-v 20.5 MiB, " * 8, "rank": 7}
    show.table([cells])
    lines = printed(capsys)
    words = " ".join(lines).split()
    assert words.count("blocks.0,") == 10 and words.count("MiB,") == 8
    assert "1.5 GiB" in lines[1] and lines[1].endswith(" 7") and lines[0].endswith("  rank")


def test_a_number_stays_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a name that no line holds, as kernels of a compiler have."""
    show.table(
        [{"kernel": "compiled::" + "fused_" * 16, "bytes": "1.2 GiB", "time": "13 ms", "for": "one two"}]
    )
    *_, row, below = capsys.readouterr().out.splitlines()
    assert row.split("  ")[1:] == ["1.2 GiB", "13 ms", "one"] and below.strip() == "two"


def test_kernels_of_a_compiler_have_rows_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    name = "compiled::triton_red_fused__fused_rms_norm__fused_rms_norm_backward__unsafe_view_add_view_15"
    show.table(_kernels([{"name": name, "count": 12345, "bytes": 2e9, "flops": 2e12}]))
    _, row = capsys.readouterr().out.splitlines()
    assert len(row) <= 80 and "..._view_add_view_15  12,345  1.9 GiB  2" in row


def test_a_word_that_is_too_long_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show.pairs({"out": "/folder" * 20, "why": "word " * 40, "steps": 3})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"out    {'/folder' * 20}"
    assert max(map(len, lines[1:])) <= show.WIDTH and lines[-1] == "steps  3"
    assert all(line.startswith("       word") for line in lines[2:-1])


@pytest.mark.parametrize(
    ("value", "text"), [(12_345.6, "12,346"), (1234.5, "1,234"), (0.1, "0.1"), (1.5e20, "1.5e+20"), (7, "7")]
)
def test_numbers_without_powers_of_ten(value: float, text: str) -> None:
    assert show.text(value) == text


def test_what_spec_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "presets"]) == 0
    assert any(line.startswith("deepseek-v3") and "671B" in line for line in printed(capsys))
    assert main(["spec", "check", *MOE]) == 0
    assert "671B parameters, 37.55B of a token; world size 8192" in printed(capsys)[0]


def test_what_goodput_prints(capsys: pytest.CaptureFixture[str]) -> None:
    system = ["--device-mtbf-hours", "50677", "--devices", "16384", "--save-seconds", "5"]
    times = ["--step-seconds", "5", "--restart-seconds", "600"]
    run = ["--batch-tokens", "16777216", "--tokens", "15.6e12", "--price", "2", "--runs", "2"]
    assert main(["goodput", *system, *times, *run]) == 0
    lines = printed(capsys)
    assert any(line.startswith("tokens a day  2") and line.endswith("B") for line in lines)
    assert lines[-2].startswith("simulated ") and lines[-1].startswith(" ")


def test_what_profile_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
    measured = ProfiledTimes(
        matmul=(Matmul("fp32", 8192, 8192, 28672, 123.4),),
        collectives=tuple(Collective(name, 1024, "host", 2**33, 12.345) for name in operations),
        collective_compute=dict.fromkeys(operations, 0.555),
        taken={"machine": "AMD EPYC 7B13 64-Core Processor, " * 5},
    )
    write(replace(cluster("cpu", 2), measured=measured), tmp_path / "here.json")
    assert main(["clusters", str(tmp_path / "here.json")]) == 0
    lines = printed(capsys)
    assert sum(line.count("EPYC") for line in lines) == 5


def test_why_a_layout_is_on_several_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "layout: dp=2 x tp=2, zero=2, micro_batch=8, recompute=none; planned for 4 x H100; next is " * 3
    monkeypatch.setattr(choose, "planned", lambda *_: (RunSpec(), why))
    monkeypatch.setattr(api, "train", lambda *_, **__: {"steps": 7})
    assert main(["train"]) == 0
    assert " ".join(" ".join(printed(capsys)).split()) == why.strip()


def test_what_a_foreign_checkpoint_holds_is_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    body = {"version": 2, "step": 1, "saved_at": "\x1b[31mred\x07", "ranks": 1, "generation": 1}
    body |= {"state": {"layout": "\x1b]0;title\x07 \x9b2J"}, "tensors": {}, "spreads": [], "parts": []}
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(f'{{"sha256":"{digest}","body":{text}}}\n')
    (tmp_path / "step-00000002\x1b[31m").mkdir()
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "red" in shown and "title" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


def test_what_a_foreign_run_file_holds_is_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"data": {"corpus": "\x1b[2J\x9b2J\x7f\x07", "mixture": {}}}
    (tmp_path / "run.json").write_text(json.dumps({"spec": given}))
    for words in (["spec", "show"], ["spec", "check"]):
        assert main([*words, str(tmp_path)]) == 0
        assert all(char.isprintable() or char == "\n" for char in capsys.readouterr().out)


@pytest.mark.parametrize("verb", ["train", "generate", "export", "import", "checkpoint ls", "data verify"])
def test_a_name_that_is_too_long_is_one_sentence(verb: str) -> None:
    rest = {"generate": ["--prompt", "a"], "export": ["out"], "import": ["--out", "out"]}
    for name in ("x" * 5_000, "/".join(["x" * 200] * 100)):
        for words in (
            [*verb.split(), name, *rest.get(verb, [])],
            ["import", "folder", "--out", name],
        ):
            with pytest.raises(UserError) as refusal:
                main(words)
            assert len(str(refusal.value)) < 400


def test_an_evaluation_of_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {"checkpoints": [{"step": 5, "domains": {}, "tasks": {}}]}
    stand_in(monkeypatch, "evaluate_run", found, evaluate)
    assert main(["evaluate", str(tmp_path)]) == 0
    assert "no text was evaluated: the run holds none out" in capsys.readouterr().out
