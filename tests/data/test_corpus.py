from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_texts import texts
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from meshwright.data import corpus as module
from meshwright.data.corpus import Corpus, open_corpus, xz_bits_per_byte
from meshwright.data.manifest import MANIFEST
from meshwright.data.packing import IGNORE
from meshwright.data.tokenize import tokenize
from meshwright.data.tokenizer import train_bpe
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import DataError

MakeSpec = Callable[..., RunSpec]


def held_out_texts(corpus: Corpus) -> str:
    return corpus.validation_text().decode()


def train_text(corpus: Corpus) -> str:
    samples = corpus.train.gather(np.arange(corpus.train.samples))
    ids = samples.targets[samples.targets != IGNORE]
    return corpus.tokenizer.decode(ids[ids != corpus.tokenizer.end_id].tolist())


def test_a_corpus_is_prepared_once_and_opened_again(make_spec: MakeSpec, tmp_path: Path) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("[!.]*/**/*")}

    first = open_corpus(make_spec())
    made = files()
    again = open_corpus(make_spec())
    assert again.digest == first.digest
    assert files() == made
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) == 1


def test_both_sides_together_are_the_corpus(make_spec: MakeSpec) -> None:
    corpus = open_corpus(make_spec())
    held, trained = held_out_texts(corpus), train_text(corpus)
    assert corpus.train.documents + corpus.validation.documents == 40
    assert len(held) + len(trained) == sum(map(len, texts(40)))
    for text in texts(40):
        assert (text in held) != (text in trained)
    assert corpus.validation.bytes_for() == len(held.encode())
    assert corpus.validation.target_tokens == len(held.encode()) + corpus.validation.documents


def test_the_split_is_the_same_under_every_tokenizer(make_spec: MakeSpec) -> None:
    sides = [open_corpus(make_spec({"tokenizer": t})) for t in ("byte", "bpe:300", "bpe:400")]
    assert len({corpus.validation_text() for corpus in sides}) == 1
    assert len({corpus.validation.bytes_for() for corpus in sides}) == 1
    assert len({corpus.digest for corpus in sides}) == 3


def test_a_prefix_of_the_validation(make_spec: MakeSpec) -> None:
    corpus = open_corpus(make_spec({"tokenizer": "bpe:300"}))
    split = corpus.validation
    whole = split.text_bytes()
    last = 0
    for limit in range(0, split.target_tokens + 1, 7):
        spelt = split.text_bytes(limit)
        assert whole.startswith(spelt) and len(spelt) == split.bytes_for(limit) >= last
        last = len(spelt)
    assert split.bytes_for(10**9) == len(whole)


def test_a_changed_corpus_or_setting_is_another_digest(make_spec: MakeSpec, folder: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seq_len": 64},
        {"pack": False},
        {"document_mask": False},
        {"val_fraction": 0.2},
        {"tokenizer": "bpe:300"},
    ]
    digests = [open_corpus(make_spec(change)).digest for change in changes]
    (folder / "new.txt").write_text("one more")
    digests.append(open_corpus(make_spec()).digest)
    assert len(set(digests)) == len(digests)


def test_a_tokenized_folder_is_a_corpus(make_spec: MakeSpec, folder: Path, tmp_path: Path) -> None:
    tokenize(str(folder), "byte", tmp_path / "tokens", vocab_size=2048)
    direct = open_corpus(make_spec({"corpus": str(tmp_path / "tokens")}))
    assert direct.digest == open_corpus(make_spec()).digest
    moved = tmp_path / "moved"
    (tmp_path / "tokens").rename(moved)
    assert open_corpus(make_spec({"corpus": str(moved)})).digest == direct.digest


def test_the_tokenizer_of_a_tokenized_folder_is_not_replaced_in_silence(
    make_spec: MakeSpec, folder: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokenize(str(folder), "bpe:400", tokens, vocab_size=400)
    for fits in ("bpe", "bpe:400", str(tokens / "tokenizer.json")):
        assert open_corpus(make_spec({"corpus": str(tokens), "tokenizer": fits})).tokenizer.vocab_size <= 400
    for other in ("byte", "bpe:300"):
        with pytest.raises(UserError, match=r"data\.tokenizer: .*was tokenized with another tokenizer"):
            open_corpus(make_spec({"corpus": str(tokens), "tokenizer": other}))


def test_a_tokenizer_larger_than_the_model_is_refused(make_spec: MakeSpec, tmp_path: Path) -> None:
    train_bpe(iter(texts(60)), 350).save(tmp_path)
    spec = make_spec({"tokenizer": str(tmp_path / "tokenizer.json")}, model={"vocab_size": 300})
    with pytest.raises(UserError, match=r"has 257 entries, more than model\.vocab_size 256"):
        open_corpus(make_spec(model={"vocab_size": 256}))
    assert not (tmp_path / "cache").exists()  # refused before any text was tokenized
    with pytest.raises(
        UserError, match=r"has 350 entries, more than model\.vocab_size 300, and the text has"
    ):
        open_corpus(spec)


def test_too_few_tokens_for_a_sample(make_spec: MakeSpec, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 20)
    with pytest.raises(UserError, match=r"data\.seq_len: 32 .* than the 21 training tokens .*at most 21"):
        open_corpus(make_spec({"corpus": str(path)}))
    fits = make_spec({"corpus": str(path), "seq_len": 21}, train={"batch_tokens": 21})
    assert open_corpus(fits).train.samples == 1
    assert open_corpus(make_spec({"corpus": str(path), "pack": False})).train.samples == 1


def test_one_document_has_no_validation(make_spec: MakeSpec, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("x" * 500)
    corpus = open_corpus(make_spec({"corpus": str(path), "val_fraction": 0.5}))
    assert corpus.validation.target_tokens == corpus.validation.samples == corpus.validation.bytes_for() == 0
    assert corpus.validation_text() == b""


def test_two_documents_have_one_each(make_spec: MakeSpec, tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("x" * 500 + "<|endoftext|>" + "y" * 500)
    corpus = open_corpus(make_spec({"corpus": str(path), "val_fraction": 1e-6}))
    assert corpus.train.documents == corpus.validation.documents == 1


def test_an_altered_cache_is_refused_and_made_again_when_deleted(make_spec: MakeSpec, tmp_path: Path) -> None:
    digest = open_corpus(make_spec()).digest
    (tokens,) = (tmp_path / "cache").rglob("*.tokens.bin")
    raw = bytearray(tokens.read_bytes())
    raw[100] ^= 1
    tokens.write_bytes(raw)
    with pytest.raises(DataError, match=r"00000\.tokens\.bin: .*damaged; delete .* made again") as caught:
        open_corpus(make_spec()).train.gather(np.arange(10))
    shutil.rmtree(str(caught.value).split("delete ")[1].split(" and it")[0])
    assert open_corpus(make_spec()).digest == digest


def mixture(folder: Path, tmp_path: Path) -> dict[str, float]:
    other = tmp_path / "other"
    other.mkdir()
    for number, text in enumerate(texts(30, seed=9)):
        (other / f"{number}.txt").write_text(f"OTHER {text}")
    return {str(folder): 3.0, str(other): 1.0}


def test_a_mixture_shares_one_tokenizer_and_numbers_samples_apart(
    make_spec: MakeSpec, folder: Path, tmp_path: Path
) -> None:
    weights = mixture(folder, tmp_path)
    corpus = open_corpus(make_spec({"mixture": weights, "tokenizer": "bpe:300"}))
    parts = [open_corpus(make_spec({"corpus": name})) for name in weights]
    assert corpus.train.documents == sum(part.train.documents for part in parts)
    assert corpus.validation_text() == b"".join(part.validation_text() for part in parts)
    first, second = corpus.train.sizes
    source, sample = corpus.order(seed=0).at(np.arange(1024))
    assert np.bincount(source).tolist() == [768, 256]
    ids = corpus.train.ids(source, sample)
    assert (ids[source == 0] < first).all() and (ids[source == 1] >= first).all()
    assert ids.max() < first + second == corpus.train.samples
    picked = np.array([first, 0, first + 3, first - 1])
    gathered = corpus.train.gather(picked)
    for row, number in enumerate(picked):
        alone = corpus.train.gather(picked[row : row + 1])
        assert np.array_equal(gathered.tokens[row], alone.tokens[0]), number
    assert open_corpus(make_spec({"mixture": weights, "tokenizer": "bpe:300"})).digest == corpus.digest
    reweighted = {**weights, str(folder): 2.0}
    assert open_corpus(make_spec({"mixture": reweighted, "tokenizer": "bpe:300"})).digest != corpus.digest


def test_text_mixed_with_a_tokenized_folder_takes_its_tokenizer(
    make_spec: MakeSpec, folder: Path, tmp_path: Path
) -> None:
    text, other = mixture(folder, tmp_path)
    tokenize(other, "bpe:300", tmp_path / "tokens", vocab_size=300)
    spec = make_spec({"mixture": {text: 1, str(tmp_path / "tokens"): 1}, "tokenizer": "bpe"})
    assert open_corpus(spec).tokenizer.vocab_size == 300
    tokenize(other, "bpe:310", tmp_path / "others", vocab_size=310)
    bad = {str(tmp_path / "tokens"): 1.0, str(tmp_path / "others"): 1.0}
    with pytest.raises(UserError, match=r"data\.mixture: .*others and .*tokens were made with different"):
        open_corpus(make_spec({"mixture": bad, "tokenizer": "bpe"}))


def test_the_synthetic_corpus_needs_no_disk(make_spec: MakeSpec, tmp_path: Path) -> None:
    corpus = open_corpus(make_spec({"corpus": "synthetic", "tokenizer": "bpe"}, model={"vocab_size": 64}))
    assert not (tmp_path / "cache").exists()
    assert corpus.validation.bytes_for() == len(corpus.validation_text())
    assert corpus.train.gather(np.arange(corpus.train.samples)).tokens.max() == 63
    with pytest.raises(UserError, match=r"data\.mixture: 'synthetic' .* cannot be mixed"):
        open_corpus(make_spec({"mixture": {"synthetic": 1.0, "stdlib": 1.0}}))


def open_slowly(spec: RunSpec, log: Path) -> str:
    """Open the corpus in another process, with a slow build that leaves a line in `log`."""
    write = module.write_shards

    def slow(*arguments: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return write(*arguments)

    module.write_shards = slow  # type: ignore[attr-defined]
    try:
        return open_corpus(spec).digest
    finally:
        module.write_shards = write  # type: ignore[attr-defined]


def test_of_many_processes_one_builds(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec, log = make_spec(), tmp_path / "log"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        digests = pool.starmap(open_slowly, [(spec, log)] * 4, chunksize=1)
    assert len(set(digests)) == 1
    assert len(log.read_text().splitlines()) == 1


def test_a_killed_builder_leaves_no_harm(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec, log = make_spec(), tmp_path / "log"
    process = multiprocessing.get_context("spawn").Process(target=open_slowly, args=(spec, log))
    process.start()
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None and log.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    cache = tmp_path / "cache"
    assert len(list(cache.glob(".*.tmp-*"))) == 1
    open_corpus(spec)
    assert not list(cache.glob(".*.tmp-*"))


def fill_the_disk(spec: RunSpec, answer: Any) -> None:
    """Open the corpus where no file may grow beyond 4 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        open_corpus(spec)
    except UserError as error:
        answer.put(str(error))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(make_spec: MakeSpec, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=fill_the_disk, args=(make_spec(), answer))
    process.start()
    process.join()
    assert process.exitcode == 0 and not answer.empty()
    sentence = answer.get()
    assert sentence.startswith("data.cache: ") and "cannot be written (File too large)" in sentence
    assert [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_a_cache_that_cannot_be_made_is_named(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache: .*cache cannot be locked and written"):
        open_corpus(make_spec())


def test_xz_is_what_the_command_gives() -> None:
    data = "".join(texts(40)).encode()
    assert 0 < xz_bits_per_byte(data) < 8
    assert xz_bits_per_byte(bytes(10_000)) < 0.2
    assert xz_bits_per_byte(np.random.default_rng(0).bytes(10_000)) > 8
    with pytest.raises(ValueError, match="nothing to compress"):
        xz_bits_per_byte(b"")


def test_tokens_without_their_manifest_are_not_trained_on_as_text(
    make_spec: MakeSpec, folder: Path, tmp_path: Path
) -> None:
    tokenize(str(folder), "byte", tmp_path / "tokens", vocab_size=2048)
    (tmp_path / "tokens" / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"data\.corpus: .*tokens holds tokens, and its .*json is missing"):
        open_corpus(make_spec({"corpus": str(tmp_path / "tokens")}))


def test_bytes_are_no_trained_bpe(make_spec: MakeSpec, folder: Path, tmp_path: Path) -> None:
    tokens = str(tmp_path / "tokens")
    tokenize(str(folder), "byte", Path(tokens), vocab_size=2048)
    with pytest.raises(UserError, match=r"data\.tokenizer: .*was tokenized with another .* than 'bpe:600'"):
        open_corpus(make_spec({"corpus": tokens, "tokenizer": "bpe:600"}))
    assert open_corpus(make_spec({"corpus": tokens, "tokenizer": "bpe"})).tokenizer.vocab_size == 257


def test_a_tokenizer_that_loses_text_has_none_to_compare(make_spec: MakeSpec, tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    corpus = open_corpus(make_spec({"tokenizer": str(tmp_path / "tokenizer.json")}))
    assert corpus.validation.text_bytes() and corpus.validation.bytes_for()
    assert corpus.validation_text() == b""


def test_a_corpus_beside_a_mixture_is_refused(make_spec: MakeSpec) -> None:
    with pytest.raises(
        UserError, match=r"data\.mixture: stdlib with weights is given together with data\.corpus = 'mine'"
    ):
        make_spec({"mixture": {"stdlib": 1.0}, "corpus": "mine"})
    assert make_spec({"mixture": {"other": 1.0}, "corpus": "stdlib"}).data.mixture == {"other": 1.0}


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_the_text_for_xz_is_a_prefix_and_no_more_is_decoded(
    make_spec: MakeSpec, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus(make_spec({"tokenizer": tokenizer, "val_fraction": 0.5}))
    split = corpus.validation
    whole = split.text_bytes()
    decode, decoded = type(corpus.tokenizer).decode_bytes, [0]

    def count(self: Any, ids: Any) -> bytes:
        found = decode(self, ids)
        decoded[0] += len(found)
        return found

    monkeypatch.setattr(type(corpus.tokenizer), "decode_bytes", count)
    sizes = []
    for limit in (1, 50, 500, 2000, len(whole) - 1, len(whole)):
        decoded[0] = 0
        text = corpus.validation_text(max_bytes=limit)
        assert whole.startswith(text) and 0 < len(text) <= limit
        assert decoded[0] <= 8 * limit
        sizes.append(len(text))
    assert sizes == sorted(sizes) and sizes[-1] == len(whole)
    validated = split.text_bytes(700)
    assert validated.startswith(corpus.validation_text(700)) and corpus.validation_text(700)


def test_xz_of_a_mixture_takes_of_each_source(make_spec: MakeSpec, folder: Path, tmp_path: Path) -> None:
    weights = mixture(folder, tmp_path)
    corpus = open_corpus(make_spec({"mixture": weights, "val_fraction": 0.5}))
    text = corpus.validation_text(max_bytes=3000)
    assert len(text) <= 3000 and b"OTHER" in text and not text.startswith(b"OTHER")


def test_other_ranks_of_a_host_do_not_read_the_text(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec({"mixture": mixture(folder, tmp_path), "tokenizer": "bpe:300"})
    digest = open_corpus(spec, "lazy").digest  # nobody has opened it yet: then it is made all the same
    monkeypatch.setattr(module, "open_source", pytest.fail)
    assert open_corpus(spec, "lazy").digest == digest
    monkeypatch.undo()
    (folder / "new.txt").write_text("one more")
    changed = open_corpus(spec).digest
    assert changed != digest and open_corpus(spec, "lazy").digest == changed
