"""`meshwright validate`: what it prints and writes of a table, and tables that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_ins import last_json

from meshwright.cli.main import main
from meshwright.spec import UserError

HEADING = "source,model,gpu,gpus,tp,layers,hidden,heads,seq_len,micro_batch,global_batch_seqs,step_seconds"
CELLS = "h100,8,8,24,2048,16,2048,1,64,1.5"


def table(tmp_path: Path, *rows: str, heading: str = HEADING) -> str:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((heading, *rows)) + "\n")
    return str(path)


def refusal(path: str, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        main(["validate", path, *flags])
    assert caught.value.code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_row_with_more_or_fewer_cells_than_the_heading_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = f"ours,gpt-a,{CELLS}"
    path = table(tmp_path, good, f"ours,gpt-b,{CELLS[:-3]}1,600", f"ours,gpt-c,{CELLS[:-4]}")
    assert main(["validate", path, "--rows", "--json"]) == 0
    found = last_json(capsys)
    assert [each["row"] for each in found["each"]] == [0]
    for each, cells in zip(found["skipped_rows"], (13, 11), strict=True):
        assert f"its number of cells is {cells}, not the heading's 12; give one for each" in each["reason"]


@pytest.mark.parametrize("name", ["just,three,cells", f"ours,gpt-a,{CELLS[:-3]}-1"])
def test_a_table_without_a_row_that_can_be_predicted_is_an_error(tmp_path: Path, name: str) -> None:
    sentence = refusal(table(tmp_path, name, name))
    assert "none of its 2 rows can be predicted: rows 0 and 1: " in sentence


@pytest.mark.parametrize(
    ("row", "says"),
    [(f"ours,gpt-\0a,{CELLS}", "it has NUL bytes"), (f'ours,"gpt-a,{CELLS}', "unexpected end of data")],
)
def test_a_table_that_is_damaged_is_an_error(tmp_path: Path, row: str, says: str) -> None:
    sentence = refusal(table(tmp_path, f"ours,gpt-a,{CELLS}", row))
    assert "cannot be read as a table" in sentence and says in sentence


def test_names_of_a_table_reach_neither_terminal_nor_page_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    path = table(tmp_path, f"a|b\x1b[2J,gpt\x1b[31m,{CELLS}", f"ours,gpt-\x1b[7m,\x1b[8m{CELLS}")
    assert main(["validate", path, "--rows", "--markdown", str(page)]) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        assert "\x1b" not in text and "\\x1b" in text
    assert "| a\\|b\\x1b[2J |" in page.read_text()
    assert all(line.count(" | ") == 11 for line in page.read_text().splitlines() if line.startswith("| "))


def test_the_table_and_the_page_are_by_the_column_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    source = "a source of a long name"
    names = ("gpt-of-the-same-beginning-a", "gpt-of-the-same-beginning-b")
    path = table(tmp_path, *(f"{source},{name},{CELLS}" for name in names))
    assert main(["validate", path, "--by", "model", "--markdown", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(source[:12] in line for line in lines)
    shown = {line.split(" is ")[1]: line.split(" is ")[0] for line in lines if " is gpt" in line}
    assert set(shown) == set(names) and len(set(shown.values())) == 2
    for name in shown.values():
        assert len(name) <= 16 and sum(line.startswith(f"{name}  ") for line in lines) == 1
    assert all(f"| {name} |" in page.read_text() for name in names) and "| model |" in page.read_text()


def test_headings_in_capitals_are_read(tmp_path: Path) -> None:
    assert main(["validate", table(tmp_path, f"ours,gpt-a,{CELLS}", heading=HEADING.upper())]) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("step_seconds", "step_time"),
        ("layers", "dtype"),
        ("layers", "stack"),
        ("layers", "expert_ffn"),
        ("gpus", "world_size"),
    ],
)
def test_a_usual_name_of_a_column_elsewhere_suggests_the_one_here(tmp_path: Path, old: str, new: str) -> None:
    meant = {"dtype": "precision", "stack": "program", "expert_ffn": "moe_ffn"}.get(new, old)
    sentence = refusal(table(tmp_path, f"ours,gpt-a,{CELLS}", heading=HEADING.replace(f",{old}", f",{new}")))
    assert f"has an unknown column '{new}'; did you mean '{meant}'?" in sentence


def test_an_empty_name_is_no_table() -> None:
    assert "'' names no file; give a table of runs" in refusal("")


def test_rows_with_words_that_are_not_known_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without --rows; of many rows with one reason the first few."""
    names = HEADING + ",where"
    rows = [f"ours,gpt-{number},{CELLS},remat_policy=mine" for number in range(2)]
    rows += [f"ours,gpt-{number},{CELLS.replace('h100,8', 'h100,-8')}," for number in range(7)]
    file = tmp_path / "runs.csv"
    file.write_text("\n".join([names, *rows, ""]))
    page = tmp_path / "page.md"
    assert main(["validate", str(file), "--markdown", str(page)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "7 rows not predicted (rows 2, 3, 4, 5, 6 and 2 more, from 0): the cell 'gpus' is '-8'" in told
    said = "rows 0 and 1, from 0: the remat policy 'mine' of its comment is not known and not counted; known"
    assert said in told
    assert "- rows 2, 3, 4, 5, 6 and 2 more: the cell 'gpus' is '-8', which" in page.read_text()


def test_a_layout_that_its_program_is_not_known_to_run_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, f"ours,gpt-a,{CELLS},llm-foundry", heading=f"{HEADING},program")
    page = tmp_path / "page.md"
    assert main(["validate", path, "--markdown", str(page)]) == 0
    assert "- row 0: layout.tp: 8 is not run by llm-foundry of 2023" in page.read_text()
    told = " ".join(capsys.readouterr().out.split())
    assert "row 0, from 0: layout.tp: 8 is not run by llm-foundry of 2023, which has no tensor" in told
    assert "it is predicted all the same" in told and " 1/1 " in told


def test_a_layout_that_its_program_does_not_run_is_predicted_not_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 blocks of nanotron leave the last of 16 stages empty, and 8 stages fit."""
    heading = "source,model,params_b,layers,hidden,ffn,heads,vocab,gpu,gpus,pp,dp,seq_len,global_batch_seqs"
    cells = "16,2048,8192,32,131072,h100"
    few = f"ours,a,1.34,{cells},16,16,1,4096,64,OOM,nanotron"
    more = f"ours,a,1.34,{cells},8,8,1,4096,64,OOM,nanotron"
    path = table(tmp_path, few, more, heading=f"{heading},peak_mem_gib,program")
    assert main(["validate", path, "--rows"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "row 0, from 0: layout.pp: 16 is not run by nanotron of 2024, whose stages end with" in told
    assert "did not fit, predicted not to run" in told and "did not fit, predicted to fit" in told
    assert " 1/2 " in told


def test_columns_that_are_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path, f"ours,gpt-a,{CELLS},me,3", heading=f"{HEADING},Author,temperature")
    assert main(["validate", path, "--json"]) == 0
    assert last_json(capsys)["unread_columns"] == ["Author", "temperature"]
    page = tmp_path / "page.md"
    assert main(["validate", path, "--markdown", str(page)]) == 0
    assert "columns that are not read: Author, temperature" in capsys.readouterr().out
    assert page.read_text().endswith("\nNotes:\n\n- columns that are not read: Author, temperature\n")


def test_a_row_without_a_layout_is_not_taken_for_one_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heading = "source,model,gpu,gpus,seq_len,global_batch_seqs,tokens_per_sec_per_gpu"
    rows = ["ours,llama3-70b,a100,2048,2048,2048,380", "ours,llama3.2-1b,a100,8,2048,64,20000"]
    assert main(["validate", table(tmp_path, *rows, heading=heading), "--rows", "--json"]) == 0
    found = last_json(capsys)
    (skipped,), (each,) = found["skipped_rows"], found["each"]
    assert "its layout is not known, and data ranks alone need" in skipped["reason"]
    assert "layout = data ranks alone" in each["inferred"]


def test_a_row_that_ran_out_of_memory_has_no_seconds(tmp_path: Path) -> None:
    path = table(tmp_path, f"ours,gpt-a,{CELLS},OOM", heading=f"{HEADING},peak_mem_gib")
    assert "it ran out of memory, and took 1.5 s a step; leave one of them out" in refusal(path)
