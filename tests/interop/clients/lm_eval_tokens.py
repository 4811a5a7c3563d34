"""Greedy continuations by lm-eval's model of HF folders:
`python lm_eval_tokens.py PROMPTS.json COUNT FOLDER...`.

Prints for each folder a JSON object: its name and the texts, or the error. The version comes first.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    prompts, count = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    print(json.dumps({"version": version("lm_eval")}), flush=True)
    how = {"until": [], "max_gen_toks": count, "do_sample": False}
    for folder in sys.argv[3:]:
        try:
            model = HFLM(pretrained=folder)
            requests = [
                Instance("generate_until", {}, (prompt, how), number) for number, prompt in enumerate(prompts)
            ]
            found = {"texts": model.generate_until(requests)}
        except Exception as error:  # whatever a client says of a folder is its row
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": folder, **found}), flush=True)


if __name__ == "__main__":
    main()
