"""Greedy continuations by vLLM, as anyone calls it: `python vllm_tokens.py PROMPTS.json COUNT FOLDER...`.

Prints for each folder a JSON object: its name and the texts, or the error. The version comes first.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    import vllm

    prompts, count = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for folder in sys.argv[3:]:
        try:
            model = vllm.LLM(folder)
            sampling = vllm.SamplingParams(temperature=0, max_tokens=count)
            texts = [each.outputs[0].text for each in model.generate(prompts, sampling)]
            found = {"texts": texts}
            del model
        except Exception as error:  # whatever a client says of a folder is its row
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": folder, **found}), flush=True)


if __name__ == "__main__":
    main()
