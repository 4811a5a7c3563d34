"""Numbers random texts by the word table in C++, compiled with the sanitizers of addresses and of undefined
behaviour: a program, since these must be loaded first (`test_words.py`)."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np

from meshwright.cpp_library import cache_folder
from meshwright.data.word_rule import GPT2, LLAMA3, QWEN2
from meshwright.data.word_table import LIBRARY, CompiledWordTable

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
LETTERS = "  \n\r\t'sSdlLaB19=)é漢\u00a0\u2028\u205f\u3000\u0085\x00"


def main() -> None:
    path = str(LIBRARY.build(cache_folder(), *FLAGS))
    draw = random.Random(0)
    for rule in (GPT2, LLAMA3, QWEN2):
        table = CompiledWordTable(rule, path)
        texts = ["".join(draw.choices(LETTERS, k=draw.randrange(40))) for _ in range(3000)]
        found = table.numbers(texts)
        words = table.words()
        assert ["".join(words[number] for number in numbers) for numbers in found] == texts
        spelled = [list(word.encode()) for word in words]
        table.add_ids(
            np.array([*map(len, spelled)], np.int64), np.array([*chain.from_iterable(spelled)], np.int64)
        )
        ids = [np.frombuffer(table.ids(numbers), "<u4").astype(np.uint8).tobytes() for numbers in found]
        assert ids == [text.encode() for text in texts]
    print(len(texts), "texts")


if __name__ == "__main__":
    main()
