"""MB/s of `meshwright tokenize`, on one core and on all, and the share of each part of its work.

    python bench/tokenising.py [--megabytes 112] [--turns 2] [--kinds file folder jsonl given]
                               [--beside OTHER/src]

The text is made of Python's own sources and those of the installed packages, each once, in an order that is
always the same. It is tokenized as one file with a BPE that is trained on it ('file'), as a folder of files
and as JSONL, in documents of one source each, and as one file with a tokenizer.json ('given'). Every command
is timed whole, start included, in turns; `--beside` takes the sources of another version into the turns and
compares what was written. The shares are of processor time, of one process that does the parts of 'file' one
after another. One JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.data import tokenize as parts
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.sources import open_source
from meshwright.data.tokenizer import bpe_of_counts
from meshwright.data.word_rule import GPT2
from meshwright.data.words import Words

SOURCE = Path(parts.__file__).parents[2]
VOCAB = 2048


def sources(megabytes: int) -> list[str]:
    """Texts of Python sources, of so many megabytes together or as many as there are."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    paths = sorted({path for root in roots for path in root.rglob("*.py")})
    random.Random(0).shuffle(paths)
    found: list[str] = []
    left = megabytes * 10**6
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if left > 0 and text.strip() and "\0" not in text and "<|endoftext|>" not in text:
            found.append(text)
            left -= len(text.encode())
    return found


def write(folder: Path, texts: list[str]) -> dict[str, list[str]]:
    """Write the corpora; returns the flags of each kind."""
    (folder / "file.txt").write_text("".join(texts), encoding="utf-8")
    (folder / "folder").mkdir()
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as rows:
        for number, text in enumerate(texts):
            (folder / "folder" / f"{number:06d}.py").write_text(text, encoding="utf-8")
            rows.write(json.dumps({"text": text}) + "\n")
    corpora = {"file": "file.txt", "folder": "folder", "jsonl": "rows.jsonl", "given": "file.txt"}
    flags = {kind: ["--data.corpus", str(folder / name)] for kind, name in corpora.items()}
    flags["given"] += ["--data.tokenizer", str(folder / "given" / "tokenizer.json")]
    return flags


def command(source: Path, cores: set[int], flags: list[str], out: Path) -> dict[str, Any]:
    """Returns what `tokenize` reports, with its seconds by the clock and of the processors."""
    call = [sys.executable, "-m", "meshwright", "tokenize", "--model.vocab_size", str(VOCAB), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [*call, *flags, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(source)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=True,
        capture_output=True,
        text=True,
    )
    taken = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "seconds": taken, "processor_seconds": used}


def shares(corpus: Path, out: Path) -> dict[str, float]:
    """Processor time of each part of 'file', in percent, in this process alone."""
    taken: dict[str, float] = {}
    gc.disable()  # as in the processes of the command

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = work()
        taken[name] = time.process_time() - start
        return found

    texts = timed("read", lambda: list(open_source(str(corpus), "text").documents()))
    timed("hash", lambda: [parts.content_hash(text.encode()) for text in texts])
    pieces = timed("cut", lambda: [piece for text in texts for piece in parts._learnt(text, 0, (0, 0))])
    words = Words(GPT2)
    numbers = timed("number words", lambda: [words.keep([(piece.text, piece.learnt)]) for piece in pieces])
    counts = timed("count words", words.word_counts)
    tokenizer = timed("learn merges", lambda: bpe_of_counts(counts, VOCAB))
    words.load(tokenizer.json, "<u2")
    timed("encode words", lambda: words._ids([]))
    ids = timed("put ids together", lambda: [words.kept(number)[0] for number in numbers])
    with ShardWriter(out, tokenizer) as writer:
        joined = parts.np.frombuffer(b"".join(ids), "<u2")
        timed("write", lambda: (writer.add(joined, 0, 0), writer.finish()))
    return {name: round(100 * each / sum(taken.values()), 1) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=112)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=["file", "folder", "jsonl", "given"])
    parser.add_argument("--beside", type=Path, help="sources of another version")
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    versions = {"now": SOURCE, **({"beside": options.beside} if options.beside else {})}
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        flags = write(folder, sources(options.megabytes))
        command(SOURCE, every, flags["file"], folder / "given")
        for turn in range(options.turns):
            for kind in options.kinds:
                for version, source in versions.items():
                    for cores in (every, {min(every)}) if version == "now" else (every,):
                        out = folder / f"{turn}-{kind}-{version}-{len(cores)}"
                        run = command(source, cores, flags[kind], out)
                        runs.setdefault((kind, version, len(cores)), []).append(run)
        found: dict[str, Any] = {"cores": len(every), "runs": []}
        for (kind, version, cores), rows in runs.items():
            assert {row["sha256"] for row in rows} == {runs[kind, "now", len(every)][0]["sha256"]}
            seconds, used = (
                statistics.median(row[key] for row in rows) for key in ("seconds", "processor_seconds")
            )
            row = {"kind": kind, "version": version, "cores": cores, "seconds": round(seconds, 2)}
            rate = rows[0]["utf8_bytes"] / seconds / 1e6
            found["runs"].append({**row, "processor_seconds": round(used, 2), "mb_per_s": round(rate, 1)})
        found["shares"] = shares(folder / "file.txt", folder / "shares")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
