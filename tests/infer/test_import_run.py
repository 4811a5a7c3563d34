"""An HF folder through import, generate and export: its own first token, and all of its side files."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from meshwright import api
from meshwright.api.generation import Generation, continue_prompts
from meshwright.api.options import completed
from meshwright.api.prompt_remarks import NOT_APPLIED
from meshwright.data.corpus import open_sources
from meshwright.data.packing import Samples
from meshwright.spec import UserError, load

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SPECIAL = ["<bos>", "<eos>", "<other>"]
PROMPT = "the cat"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with random weights, and a byte-level tokenizer without a config."""
    folder = tmp_path_factory.mktemp("theirs")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, naïvely " * 50], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def dressed(theirs: Path, folder: Path, config: dict[str, Any] | None, puts: str | None = None) -> Path:
    """A copy of the folder with this tokenizer_config.json, whose post-processor `puts` a token first."""
    shutil.copytree(theirs, folder)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if puts is not None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = [(puts, tokenizer.token_to_id(puts))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{puts} $A", special_tokens=special)
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def their_text(folder: Path, first: list[int], prompt: str) -> str:
    """Text that transformers generates greedily after the ids `first` and the prompt."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [*first, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    new: list[int] = []
    with torch.no_grad():
        while len(new) < 12:
            logits = model(torch.tensor([ids + new])).logits[0, -1, : tokenizer.get_vocab_size()]
            if (token := int(logits.argmax())) == tokenizer.token_to_id("<eos>"):
                break
            new.append(token)
    return str(tokenizer.decode(new, skip_special_tokens=False))


NAMED = {"eos_token": "<eos>", "bos_token": "<bos>"}


@pytest.mark.parametrize(
    ("config", "puts", "prompt", "first"),
    [
        (NAMED, None, PROMPT, []),
        (NAMED, "<other>", PROMPT, [2]),
        (NAMED | {"add_bos_token": True}, None, PROMPT, []),
        (NAMED | {"add_bos_token": True}, "<bos>", PROMPT, [0]),
        (NAMED | {"add_bos_token": False}, "<bos>", PROMPT, [0]),
        ({"eos_token": "<eos>"}, "<other>", PROMPT, [2]),
        ({"eos_token": "<eos>", "bos_token": None}, None, PROMPT, []),
        ({"eos_token": "<eos>", "bos_token": "<nowhere>"}, None, PROMPT, []),
        (None, None, PROMPT, []),
        (NAMED, "<bos>", "", [0]),
        ({"eos_token": "<eos>", "bos_token": None}, None, "", [1]),
    ],
)
def test_a_prompt_begins_as_the_tokenizer_says(
    theirs: Path,
    tmp_path: Path,
    config: dict[str, Any] | None,
    puts: str | None,
    prompt: str,
    first: list[int],
) -> None:
    folder = dressed(theirs, tmp_path / "hf", config, puts)
    wanted = their_text(folder, first, prompt)
    assert wanted not in [
        their_text(folder, other, prompt) for other in ([0], [1], [2], [0, 0]) if other != first
    ]
    assert api.generate(folder, prompt, max_new_tokens=12) == wanted
    api.import_hf(folder, tmp_path / "run")
    assert api.generate(tmp_path / "run", prompt, max_new_tokens=12) == wanted
    api.export(tmp_path / "run", tmp_path / "out")
    assert api.generate(tmp_path / "out", prompt, max_new_tokens=12) == wanted


def test_a_first_token_that_is_no_name_is_one_sentence(theirs: Path, tmp_path: Path) -> None:
    folder = dressed(theirs, tmp_path / "hf", NAMED | {"bos_token": 3})
    with pytest.raises(
        UserError, match=r"bos_token in .*tokenizer_config\.json is 3, not the name of a token"
    ):
        api.generate(folder, PROMPT)


SIDE_FILES = {
    "chat_template.jinja": "{% for m in messages %}<other>{{ m.content }}{% endfor %}",
    "chat_template.json": '{"chat_template": "old"}',
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "special_tokens_map.json": json.dumps(NAMED),
    "added_tokens.json": '{"<other>": 2}',
    "generation_config.json": json.dumps({"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2]}),
    "vocab.json": "{}",
    "merges.txt": "#version: 0.2\n",
}


def test_side_files_go_in_and_out(theirs: Path, tmp_path: Path) -> None:
    folder = dressed(theirs, tmp_path / "hf", NAMED | {"tokenizer_class": "PreTrainedTokenizerFast"})
    for name, content in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "README.md").write_text("not of the tokenizer")
    run, out = tmp_path / "run", tmp_path / "out"
    api.import_hf(folder, run)
    api.export(run, out)
    for name, content in SIDE_FILES.items():
        assert (run / name).read_text() == (out / name).read_text() == content, name
    assert not (run / "README.md").exists() and not (out / "run.json").exists()
    opened, before = (transformers.AutoTokenizer.from_pretrained(path) for path in (out, folder))
    chat = [{"role": "user", "content": PROMPT}]
    assert opened.apply_chat_template(chat, tokenize=False) == f"<other>{PROMPT}"
    assert opened(PROMPT).input_ids == before(PROMPT).input_ids
    assert (opened.bos_token, opened.eos_token, opened.model_max_length) == ("<bos>", "<eos>", 64)
    model, old = (transformers.AutoModelForCausalLM.from_pretrained(path).eval() for path in (out, folder))
    assert model.generation_config.eos_token_id == [1, 2] and model.generation_config.temperature == 0.6
    tokens = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, old(tokens).logits)


def test_a_folder_without_a_tokenizer_json_keeps_its_other_files(theirs: Path, tmp_path: Path) -> None:
    folder = dressed(theirs, tmp_path / "hf", None)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x00pieces")
    api.import_hf(folder, tmp_path / "run")
    api.export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\x00pieces"
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == 1
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        api.generate(tmp_path / "out", PROMPT)


def test_files_of_the_tokenizer_come_through_a_training(theirs: Path, tmp_path: Path) -> None:
    """Byte for byte, with the config's ids, and its documents begin as prompts do."""
    template = "{% for m in messages %}<other>{{ m.content }}<eos>{% endfor %}"
    config = {**NAMED, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    folder = dressed(theirs, tmp_path / "hf", config | {"chat_template": template}, "<bos>")
    for name, content in SIDE_FILES.items():
        if not name.startswith(("chat", "special", "additional")):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
    ids = json.loads((folder / "config.json").read_text())
    ids |= {"eos_token_id": [1, 2], "pad_token_id": 2}
    (folder / "config.json").write_text(json.dumps(ids))
    run, out, text = tmp_path / "run", tmp_path / "out", tmp_path / "text.jsonl"
    chats = [[{"content": f"the cat {number}"}, {"content": "sat"}] for number in range(20)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in rendered))
    api.import_hf(folder, run)
    flags = [
        ("data.corpus", str(text)), ("data.cache", str(tmp_path / "cache")), ("data.seq_len", "32"),
        ("data.special_tokens", "read"), ("train.batch_tokens", "64"), ("train.steps", "1"),
    ]  # fmt: skip
    api.train(load(run, flags), out=run, resume="auto", quiet=True)
    api.export(run, out)
    for path in [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]:
        if path.name != "config.json":
            assert (out / path.relative_to(folder)).read_bytes() == path.read_bytes(), path
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        "bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2
    }  # fmt: skip
    assert not [path for path in out.iterdir() if "meshwright" in path.name]
    corpus = open_sources(load(run, flags))
    seen = {
        tuple(ids)
        for split in (corpus.train, corpus.validation)
        for ids in split_at_begin(split.gather(np.arange(split.samples)))
    }
    assert seen == {(0, *tokenizer(each, add_special_tokens=False).input_ids[:-1]) for each in rendered}
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again.apply_chat_template(chats[0], tokenize=False) == rendered[0]


def split_at_begin(samples: Samples) -> list[list[int]]:
    """The documents of packed samples, each from its first token to the one before its end."""
    real = samples.targets >= 0
    tokens, begins = samples.tokens[real], np.flatnonzero(samples.tokens[real] == 0)
    return [part.tolist() for part in np.split(tokens, begins[1:])]


def test_special_tokens_of_a_prompt(theirs: Path, tmp_path: Path) -> None:
    folder = dressed(theirs, tmp_path / "hf", NAMED, "<bos>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "<other>the cat<eos>\n<other>sat"
    wanted = {
        "read": tokenizer(prompt).input_ids,
        "rendered": tokenizer(prompt, add_special_tokens=False).input_ids,
        "text": tokenizer(prompt, split_special_tokens=True).input_ids,
    }
    for how, ids in wanted.items():
        told = pytest.warns(UserWarning, match="3 literals of special tokens such as <other> were read")
        with told if how == "text" else nullcontext():
            generation = completed(Generation, {"max_new_tokens": 1, "special_tokens": how})
            (row,) = continue_prompts(folder, [{"prompt": prompt}], generation)
        assert row["prompt_tokens"] == len(ids)
    with pytest.warns(UserWarning, match=r"1 of 1 prompts begin with <bos>.*--special-tokens rendered"):
        api.generate(folder, "<bos>the cat", max_new_tokens=1)
    with pytest.raises(UserError, match=r"special_tokens: 'all' is not one of read, text, rendered"):
        api.generate(folder, "the cat", special_tokens="all")


@pytest.mark.parametrize("name", NOT_APPLIED)
def test_settings_of_a_generation_that_are_not_applied_are_told(
    name: str, theirs: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """A setting is told if transformers continues the prompt otherwise with it, and only then."""
    folder = dressed(theirs, tmp_path / "hf", NAMED)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids

    def continued(**settings: Any) -> list[int]:
        how = transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=1, **settings
        )
        ids = model.generate(prompt, generation_config=how, tokenizer=tokenizer)[0, prompt.shape[1] :]
        return [int(number) for number in ids]

    plain = continued()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, name: NOT_APPLIED[name]}))
    assert continued(**{name: NOT_APPLIED[name]}) == plain
    api.generate(folder, PROMPT, max_new_tokens=1)
    assert not [each for each in recwarn if "not applied" in str(each.message)]
    value = {
        "bad_words_ids": [plain[:1]], "begin_suppress_tokens": plain[:1], "forced_eos_token_id": 1,
        "no_repeat_ngram_size": 1, "num_beams": 4, "repetition_penalty": 9.0,
        "sequence_bias": [[plain[:1], -99.0]],
        "stop_strings": [next(filter(str.isascii, map(tokenizer.decode, plain[:9])))],
        "suppress_tokens": plain[:1],
    }.get(name)  # fmt: skip
    if value is None:  # what acts for this prompt in other models, or near the end, alone
        value = {"exponential_decay_length_penalty": [1, 1.5], "encoder_repetition_penalty": 2.0}.get(name, 3)
    else:
        assert continued(**{name: value}) != plain
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, name: value}))
    with pytest.warns(UserWarning, match=rf"asks for {name} .*, which is not applied"):
        api.generate(folder, PROMPT, max_new_tokens=1)


def test_a_generation_ends_at_each_token_of_the_list(theirs: Path, tmp_path: Path) -> None:
    folder = dressed(theirs, tmp_path / "hf", NAMED)
    (row,) = continue_prompts(folder, [{"prompt": PROMPT}], completed(Generation, {"max_new_tokens": 12}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    new = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=1)[
        0, prompt.shape[1] :
    ].tolist()
    assert row["new_tokens"] == 12 and len(new) == 12
    place = next(place for place in range(3, 12) if new[place] not in new[:place])
    for listed in ([1, new[place]], [new[place], 1], new[place]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        how = completed(Generation, {"max_new_tokens": 12})
        if listed == new[place]:
            with pytest.warns(UserWarning, match="and not at <eos>, which ends documents"):
                (row,) = continue_prompts(folder, [{"prompt": PROMPT}], how)
        else:
            (row,) = continue_prompts(folder, [{"prompt": PROMPT}], how)
        assert (row["new_tokens"], row["stopped"]) == (place, True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 99_999}))
    with pytest.warns(UserWarning, match="ends generations at eos_token_id 99999, which none of its"):
        (row,) = continue_prompts(folder, [{"prompt": PROMPT}], how)
    assert (row["new_tokens"], row["stopped"]) == (12, False)
