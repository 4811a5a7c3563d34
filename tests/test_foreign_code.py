"""No file of a stranger's makes this program run code: run files, records, tokenizers, HF folders, folders of
tokens and checkpoints, each with flipped bits, pickles, templates and code in every file and every text."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import random
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import small
from hf_models import read_whole
from meshwright.checkpoint import CheckpointStore, Lease
from meshwright.checkpoint.inspect import list_checkpoints, verify_checkpoint
from meshwright.data.shards import TokenShards
from meshwright.data.tokenize import tokenize
from meshwright.data.tokenizer import Tokenizer, byte_tokenizer
from meshwright.exchange.hf import export_hf
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.runs.record import read_run
from meshwright.spec import UserError, load
from meshwright.spec.hf.special_tokens import side_files
from meshwright.spec.toml import to_toml

ALWAYS = {
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen",
    "ctypes.dlopen", "shutil.unpack_archive",
}  # fmt: skip
LIBRARIES = tuple(
    str(Path(each).resolve())
    for each in (sysconfig.get_path("stdlib"), *site.getsitepackages(), inspect.getfile(load) + "/../..")
)
KNOWN = {*sys.stdlib_module_names, "meshwright", "torch", "numpy", "pydantic", "pydantic_core", "tokenizers"}
KNOWN |= {"safetensors", "annotated_types", "typing_extensions", "packaging"}


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


TEXTS = [
    "__import__('os').system('true')",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "!!python/object/apply:os.system ['true']",
    "foreign_module.py",
    "foreign_module:run",
    "foreign_module",
    "$(true)",
    "../../foreign_module.py",
]
CONTENTS = [
    pickle.dumps(Exploit()),
    pickle.dumps(Exploit(), protocol=0),
    b"import os; os.system('true')",
    b'{"auto_map": {"AutoConfig": "foreign_module.Config"}, "model_type": "foreign_module"}',
]


class _Watch:
    """Audit events that mean that code of a file ran. Hooks stay for the process, so it is switched."""

    def __init__(self) -> None:
        self.on, self.ran = False, list[str]()
        self._annotations: set[str] = set()
        self._evaluating = 0
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self) -> Iterator[None]:
        modules = [each for name, each in list(sys.modules.items()) if name.startswith("meshwright")]
        classes = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
        hints = (vars(each).get("__annotations__", {}) for base in classes for each in base.__mro__)
        self._annotations = {str(hint) for table in hints for hint in table.values()}
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in ALWAYS or (event == "import" and arguments[0].partition(".")[0] not in KNOWN):
            self.ran.append(f"{event} {arguments}"[:200])
        elif event == "compile":
            source, file = arguments
            if source in self._annotations:  # of a dataclass, to find the type that a sentence names
                self._evaluating += 1
            elif not str(file).startswith(LIBRARIES):
                self.ran.append(f"compile {source!r}"[:200])
        elif event == "exec" and not arguments[0].co_filename.startswith((*LIBRARIES, "<frozen")):
            if not self._evaluating:
                self.ran.append(f"exec {arguments[0]}")
            self._evaluating = max(0, self._evaluating - 1)


WATCH = _Watch()


class Kind(NamedTuple):
    """Files that strangers may give: how valid ones are made, and all that reads them."""

    make: Callable[[Path], None]
    read: Callable[[Path], object]


def make_run_file(folder: Path) -> None:
    (folder / "run.toml").write_text(to_toml(load(None, [("train.trackers", "wandb")])))


def make_record(folder: Path) -> None:
    record = {"spec": load().to_json(), "version": "1", "starts": []}
    (folder / "run.json").write_text(json.dumps(record))
    for name in ("metrics.jsonl", "events.jsonl"):
        (folder / name).write_text('{"step": 1, "loss": 2.5, "kind": "checkpoint"}\n')
    (folder / "result.json").write_text('{"steps": 1}')


def make_tokenizer(folder: Path) -> None:
    byte_tokenizer().save(folder)


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder / "tokenizer.json")
    tokenizer.decode(tokenizer.encode("a naïve text"))


def make_hf(folder: Path) -> None:
    byte_tokenizer().save(folder)
    decoder = init_whole_(Decoder(small.spec_of({"model.vocab_size": 300, "model.layers": 1}).model), 0)
    export_hf(folder / "hf", decoder.spec, decoder.tensors(), folder / "tokenizer.json", side_files=folder)
    for path in [*(folder / "hf").iterdir()]:
        path.replace(folder / path.name)
    (folder / "chat_template.jinja").write_text(TEXTS[1])


def read_hf(folder: Path) -> None:
    side_files(folder, "import")
    read_whole(folder)
    read_tokenizer(folder)


def make_tokens(folder: Path) -> None:
    (folder.parent / "text.txt").write_text("some words\n" * 50)
    folder.rmdir()
    tokenize(str(folder.parent / "text.txt"), "byte", folder, vocab_size=300)


def read_tokens(folder: Path) -> None:
    TokenShards(folder, check="content").take(np.zeros(1, np.int64))


def make_checkpoint(folder: Path) -> None:
    store = CheckpointStore(folder, 2)
    store.save(10, {"model/x": torch.ones(9)}, {"step": 10, "note": "ok"})
    store.close()


def read_checkpoint(folder: Path) -> None:
    list_checkpoints(folder)
    verify_checkpoint(folder)
    CheckpointStore(folder, 2).load(None, {"model/x": torch.zeros(9)})
    with Lease(folder, "a test"):
        pass


KINDS = {
    "run file": Kind(make_run_file, lambda folder: load(folder / "run.toml")),
    "record": Kind(make_record, lambda folder: (load(folder), read_run(folder))),
    "tokenizer": Kind(make_tokenizer, read_tokenizer),
    "HF folder": Kind(make_hf, read_hf),
    "tokens": Kind(
        make_tokens, lambda folder: TokenShards(folder, check="content").take(np.zeros(1, np.int64))
    ),
    "checkpoint": Kind(make_checkpoint, read_checkpoint),
}


def with_text(tree: Any, number: int, text: str) -> Any:
    """A tree of JSON with `text` in place of its number-th text or number, counted around."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            walk(value) if isinstance(value, (dict, list)) else places.append((node, key))

    walk(tree)
    if places:
        node, key = places[number % len(places)]
        node[key] = text
    return tree


def damaged(content: bytes, flips: int, draw: random.Random) -> Iterator[bytes]:
    """Yield what a stranger may have put in a file's place."""
    yield from CONTENTS
    for number, text in enumerate(TEXTS):
        if number % 2:
            yield content.replace(b'"', f'"{text}'.encode(), draw.randrange(1, 9))
            continue
        try:
            yield json.dumps(with_text(json.loads(content), draw.randrange(10**6), text)).encode()
        except ValueError:
            yield text.encode()
    for _ in range(flips):
        flipped = bytearray(content or b"0")
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


@pytest.mark.parametrize("flips", [2, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", KINDS)
def test_no_code_of_a_file_runs(
    name: str, flips: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, read = KINDS[name]
    folder = tmp_path / "given"
    folder.mkdir()
    make(folder)
    (folder / "foreign_module.py").write_text("raise SystemExit('code of a stranger ran')")
    monkeypatch.chdir(folder)
    read(folder)  # what is imported late is imported now
    draw, refused = random.Random(0), 0
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".py"]
    for path in files:
        original = path.read_bytes()
        for content in damaged(original, flips, draw):
            path.write_bytes(content)
            with WATCH.watching():
                try:
                    read(folder)
                except UserError as error:
                    refused += 1
                    assert len(str(error).splitlines()) == 1
        path.write_bytes(original)
    assert refused >= 8
    assert WATCH.ran == []


def test_the_watch_sees_code_that_runs() -> None:
    """Without this the test above could pass by seeing nothing."""
    for run in (
        lambda: pickle.loads(pickle.dumps(Exploit())),
        lambda: eval("1 + 1"),
        lambda: __import__("foreign_module"),
    ):
        with WATCH.watching(), suppress(ImportError):
            run()
        assert WATCH.ran
        WATCH.ran.clear()
