"""The documents are true: commands parse, links resolve, keys exist, the twin says the same."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

from command_lines import parsed
from meshwright import api
from meshwright.cli.main import main
from meshwright.cli.overview import SUMMARIES
from meshwright.cli.parser import Call
from meshwright.rank.env import resized, resolve
from meshwright.rank.failure import KINDS
from meshwright.spec import load
from meshwright.spec.errors import CRASH_LOOP, REQUEUE
from meshwright.spec.load import from_tree, read_tree
from meshwright.spec.model_names import preset_named
from meshwright.spec.schema import Key, known_keys

ROOT = Path(__file__).resolve().parent.parent
READMES = (ROOT / "README.md", ROOT / "README.es.md")
SPANISH = (*ROOT.glob("*.es.md"), *sorted((ROOT / "docs").glob("*.es.md")))
DOCUMENTS = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_PATH = re.compile(r"`([.\w-]+(?:/[.\w-]+)*/?)`(?:: `(test_\w+)`)?")


def blocks(document: Path, language: str | None = None) -> list[str]:
    """The fenced blocks, of one language or of all."""
    found = _FENCE.findall(document.read_text(encoding="utf-8"))
    return [text for name, text in found if language is None or name == language]


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def headings(document: Path) -> list[tuple[int, str]]:
    """(level, text) of each heading."""
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.+)$", prose(document), re.MULTILINE)]


def anchor(heading: str) -> str:
    """The anchor that GitHub and mkdocs give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(document: Path) -> list[list[str]]:
    """The words after `meshwright` of every command line, in blocks of commands and in those with outputs."""
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    shown = [line for block in blocks(document, "console") for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
    split = [shlex.split(line, comments=True) for line in lines]
    plain = [words[1:] for words in split if words and words[0] == "meshwright"]
    launched = [words[words.index("meshwright") + 1 :] for words in split if words and words[0] == "torchrun"]
    return plain + launched


def tree_of(call: Call) -> dict[str, Any]:
    """Content of a command's run file, such as the run.toml of docs/train.md, or the preset of a name; a
    folder says nothing."""
    path = call.path()
    if path is not None and (preset := preset_named(call.words[0])) is not None:
        return {"model": {"preset": preset}}
    if path is None or path.suffix != ".toml" or "have" in call.flags:  # a file that init writes
        return {}
    if path.name == "run.toml":
        return tomllib.loads(blocks(ROOT / "docs" / "train.md", "toml")[0])
    return read_tree(ROOT / path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_parses_and_asks_for_a_run_that_can_be(document: Path) -> None:
    for words in commands(document):
        if "--help" in words:
            continue
        verb, call = parsed(words)
        if call.flags.get("nodes"):  # processes of each host
            assert resized(from_tree(tree_of(call), call.overrides), int(call.flags["nproc"]))
        elif verb.keys:
            written = [(key, text) for key, text in call.overrides if key != "model.hf"]  # by another command
            resolve(tree_of(call), written, call.flags.get("nproc"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_row_is_in_a_table_with_a_head(document: Path) -> None:
    """A row behind an empty line is no row: it is shown with its bars."""
    lines = ["", *prose(document).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.match(r"\|[ :|-]+\|$", after), line


def test_the_readme_names_the_page_of_every_verb_and_the_page_shows_it() -> None:
    rows = [line for line in prose(READMES[0]).splitlines() if line.startswith("| [`")]
    pages = {
        label.strip("`"): target
        for row in rows
        for label, target in re.findall(r"\[(`[a-z ]+`)\]\(([^)]+)\)", row)
    }
    assert set(pages) == set(SUMMARIES)
    for verb, page in pages.items():
        shown = {parsed(words)[0].name for words in commands(ROOT / page) if "--help" not in words}
        assert verb in shown, f"{page} has no command of {verb}"


def test_the_readme_is_short_enough_to_be_read() -> None:
    for readme in READMES:
        assert len(readme.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_jobs_of_the_readme_have_a_command_each_which_the_home_shows() -> None:
    lines = [line for line in prose(READMES[0]).splitlines() if " | `meshwright " in line]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert 8 <= len(rows) <= 12
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for _have, want, command in rows:
        assert _LINK.search(want), f"{want} links to no page"
        assert parsed(shlex.split(command.strip("`"))[1:])
        assert f"\n{command.strip('`')}\n" in home


def test_the_repository_has_one_address() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    address = re.findall(r"^repo_url: (\S+)$", site, re.MULTILINE)
    for readme in READMES:
        cloned = re.findall(r"^git clone (\S+)\.git$", readme.read_text(encoding="utf-8"), re.MULTILINE)
        assert cloned == address


def test_every_page_is_in_the_navigation_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    pages = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_page_begins_with_a_sentence() -> None:
    """A page says what it is for before its commands and tables."""
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"\A---\n.*?^---\n\n", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
        title, *rest = [part for part in text.split("\n\n") if not part.startswith("*[")]
        assert title.startswith("# "), page.name
        assert re.match(r"[A-Z`]", rest[0]) and not rest[0].startswith("```"), page.name


def test_the_speeds_of_the_readme_are_measured() -> None:
    """Each row is the first table of its section in docs/peers.md: ours, and the peer of the least ratio."""
    page = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\S+, \w+: [^|]+) \| ([\d,]+) \| ([\d,]+) \| ([^|]+) \| ([\d.]+) \|$", prose(READMES[0]), re.M
    )
    assert len(rows) == 6
    for case, ours, theirs, peer, ratio in rows:
        table = page.split(f"## {case}\n\n")[1].split("\n\n")[1]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        speeds = {name: (speed, by) for name, speed, _, by, *_ in cells}
        assert speeds["Meshwright"][0] == ours
        assert speeds[peer] == (theirs, ratio)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_toml_block_is_a_run(document: Path) -> None:
    for block in blocks(document, "toml"):
        from_tree(tomllib.loads(block))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_compile_and_name_what_there_is(document: Path) -> None:
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "api"
            ):
                assert hasattr(api, node.attr), f"api.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshwright"):
                module = __import__(node.module, fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
    for name in re.findall(r"`api\.(\w+)\b(?<!\.py)", prose(document)):
        assert hasattr(api, name), f"api.{name}"


def test_the_interface_is_what_its_page_lists() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert set(api.__all__) == set(re.findall(r"`api\.(\w+)\(", page))
    assert all(callable(getattr(api, name)) for name in api.__all__)
    public = {name for name, value in vars(api).items() if isfunction(value) and not name.startswith("_")}
    assert public - {"import_module"} == set(api.__all__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_is_there(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words for block in blocks(document, "sh") for words in re.findall(r"^make (\w+)", block, re.M)}
    named |= set(re.findall(r"`make (\w+)", prose(document)))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_resolves(document: Path) -> None:
    for label, target in _LINK.findall(prose(document)):
        if target.startswith("https://"):
            continue
        name, _, fragment = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.is_file(), f"{target} is not there"
        if fragment:
            assert fragment in {anchor(text) for _, text in headings(path)}, target
        if (test := label.strip("`")).startswith("test_"):
            assert defines(path, test), f"{target} has no {test}"


FOLDERS = ("src", "tests", "bench", "docs", "examples", "tools", ".ci")
"""Folders of the repository; those that runs make, such as `runs`, are not among them."""


OF_RUNS = ("runs", "islands")


def paths_named(document: Path) -> list[tuple[Path, str]]:
    """(path, test) of every file and folder of the repository that the prose names in backticks.

    A name is taken for a path if it begins with one of FOLDERS, or with a folder of `src/meshwright`; runs
    make folders of the names in OF_RUNS, too, so there only modules are.
    """
    package = ROOT / "src" / "meshwright"
    named = []
    for name, test in _PATH.findall(prose(document)):
        base = ROOT if name.split("/")[0] in FOLDERS else package
        of_run = base == package and name.split("/")[0] in OF_RUNS and not name.endswith(".py")
        if "/" in name and not of_run and (base / name.split("/")[0]).is_dir():
            named.append((base / name, test))
    return named


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_is_named_exists(document: Path) -> None:
    for path, test in paths_named(document):
        assert path.exists(), f"{document.name} names {path.relative_to(ROOT)}"
        assert path.suffix == ".py" or not test
        assert not test or defines(path, test), f"{path} has no {test}"


def test_paths_are_recognised(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "`spec/load.py`, `tests/gone.py`, `planner/cost/`, `runs/first`, `a/b`, `report.html`"
    )
    assert [(path.relative_to(ROOT).as_posix(), path.exists()) for path, _ in paths_named(document)] == [
        ("src/meshwright/spec/load.py", True),
        ("tests/gone.py", False),
        ("src/meshwright/planner/cost", True),
    ]


def defines(path: Path, function: str) -> bool:
    """True if a module has a function of this name."""
    return function in functions(path)


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of a module's functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_each_feature_links_to_a_test() -> None:
    features = prose(ROOT / "docs" / "features.md")
    rows = [line for line in features.splitlines() if line.startswith("| ")][1:]  # without the head
    rows = [row for row in rows if not row.startswith("| ---")]
    assert rows
    for row in rows:
        proof = row.strip("| ").split(" | ")[-1]
        links = _LINK.findall(proof)
        assert links and all(label.strip("`").startswith("test_") for label, _ in links), row


@pytest.mark.parametrize("spanish", SPANISH, ids=lambda path: path.name)
def test_spanish_pages_follow_the_english_ones(spanish: Path) -> None:
    english = spanish.with_name(spanish.name.replace(".es.md", ".md"))
    assert [level for level, _ in headings(spanish)] == [level for level, _ in headings(english)]
    assert blocks(spanish) == blocks(english)
    tables = [re.findall(r"^\|", prose(document), re.MULTILINE) for document in (english, spanish)]
    assert len(tables[0]) == len(tables[1])

    def targets(document: Path) -> list[str]:
        names = [target.replace(".es.md", ".md") for _, target in _LINK.findall(prose(document))]
        return [name for name in names if not name.startswith("#")]

    assert targets(spanish) == targets(english)


def values(key: Key) -> str:
    """A key's values as docs/run.md shows them: a bar would end the table's cell."""
    return key.text.replace(" | ", "|").replace("|", " or ")


def test_the_run_file_page_has_exactly_the_known_keys() -> None:
    lines = prose(ROOT / "docs" / "run.md").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    shown = {name.strip("`"): (values, default.strip("`")) for name, values, default, _ in rows}
    assert len(shown) == len(rows)
    assert list(shown) == list(known_keys())
    for name, key in known_keys().items():
        assert shown[name][0] == values(key), name
        assert shown[name][1] == key.default or (
            not key.default and shown[name][1] in ("from the preset", "must be given")
        ), name


def test_the_examples_are_what_the_pages_say() -> None:
    spec = load(ROOT / "examples" / "first.toml")
    assert spec.layout.world_size == 2 and spec.data.corpus == "stdlib"
    assert (
        spec.train.total_steps == 300
    )  # the step that docs/train.md resumes from and docs/checkpoints.md verifies
    mine = from_tree(tomllib.loads(blocks(ROOT / "docs" / "train.md", "toml")[0]))
    assert round(mine.model.parameters / 1e6) == 32


def test_the_explanation_shown_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = ROOT / "docs" / "explain.md"
    monkeypatch.chdir(tmp_path)
    assert main(commands(document)[0]) == 0
    assert capsys.readouterr().out == blocks(document, "text")[0]


def test_exit_codes_are_those_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {0, 1, REQUEUE, CRASH_LOOP, *KINDS}
    table = re.findall(r"^\| (\d+) \|", prose(ROOT / "docs" / "recovery.md"), re.MULTILINE)
    assert [int(code) for code in table] == sorted(codes)
    assert main(["--help"]) == 0
    assert codes <= {int(number) for number in re.findall(r"\b\d+\b", capsys.readouterr().out)}
