"""Tokenizer files of an exported HF folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from meshwright.spec import UserError
from meshwright.spec.hf_json import read_json_object
from meshwright.spec.special_tokens import KNOWN_ENDS, find_bos, token_name


@dataclass(frozen=True)
class Ends:
    """The tokens (text, id) that end and begin a text; None for one that the tokenizer does not have."""

    eos: tuple[str, int] | None = None
    bos: tuple[str, int] | None = None

    @staticmethod
    def of(tokenizer_file: Path) -> Ends:
        """As the `tokenizer_config.json` beside the file says.

        Else the end has a known name, and the beginning is what the tokenizer's post-processor puts first.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"export: {tokenizer_file} is not a tokenizer.json ({error})") from error
        known = [(name, i) for name in KNOWN_ENDS if (i := backend.token_to_id(name)) is not None]
        path = tokenizer_file.with_name("tokenizer_config.json")
        config = read_json_object(path, "export") if path.is_file() else {}
        name = token_name(config.get("eos_token"))
        eos = known[0] if name is None and known else None
        if name is not None and (number := backend.token_to_id(name)) is not None:
            eos = (name, number)
        if eos is None:
            wanted = repr(name) if name is not None else f"any of {', '.join(KNOWN_ENDS)}"
            raise UserError(
                f"export: {tokenizer_file} has no end-of-document token {wanted}; name one of its tokens as "
                f"eos_token in {path.name} beside it"
            )
        bos = find_bos(config, json.loads(backend.to_str())["post_processor"], backend.token_to_id)
        return Ends(eos, (str(backend.id_to_token(bos)), bos) if bos is not None else None)

    def ids(self) -> dict[str, int | None]:
        """The two as keys of config.json and generation_config.json."""
        return {
            "bos_token_id": self.bos[1] if self.bos else None,
            "eos_token_id": self.eos[1] if self.eos else None,
        }


def write_tokenizer(folder: Path, tokenizer_file: Path, ends: Ends, max_seq_len: int) -> None:
    """The tokenizer into `folder`, with its `tokenizer_config.json`, or one that names its ends."""
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    beside = tokenizer_file.with_name("tokenizer_config.json")
    if beside.is_file():
        shutil.copyfile(beside, folder / beside.name)
        config = read_json_object(beside, "export")
        if "model_max_length" not in config:
            write_json(folder / beside.name, config | {"model_max_length": max_seq_len})
        return
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ends.bos[0] if ends.bos else None,
        "eos_token": ends.eos[0] if ends.eos else None,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / beside.name, config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """An indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
