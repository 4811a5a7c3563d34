"""Greedy tokens of prompts by `transformers.pipeline`, as anyone calls it:
`python transformers_tokens.py FOLDER PROMPTS.json COUNT`.

Prints the version and the texts as the last line of the output, a JSON object.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    import transformers

    folder, prompts, count = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    generator = transformers.pipeline("text-generation", folder)
    found = [
        generator(prompt, max_new_tokens=count, do_sample=False, return_full_text=False)[0]["generated_text"]
        for prompt in prompts
    ]
    print(json.dumps({"version": transformers.__version__, "texts": found}))


if __name__ == "__main__":
    main()
