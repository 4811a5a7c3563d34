"""Greedy tokens of prompts by vLLM, as anyone calls it: `python vllm_tokens.py FOLDER PROMPTS.json COUNT`.

Prints the version and the token ids as the last line of the output, a JSON object.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    import vllm

    folder, prompts, count = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
    model = vllm.LLM(folder)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=count)
    found = [list(each.outputs[0].token_ids) for each in model.generate(prompts, sampling)]
    print(json.dumps({"version": vllm.__version__, "tokens": found}))


if __name__ == "__main__":
    main()
