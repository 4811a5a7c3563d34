"""Greedy continuations by llama.cpp, in its wheel for CPUs:
`python llama_cpp_tokens.py ASKED.json FILE...`.

Prints for each GGUF file a JSON object: its name and the texts, or the error. The version comes first.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    import xllamacpp

    asked = json.loads(Path(sys.argv[1]).read_text())
    prompts, count = asked["prompts"], asked["count"]
    print(json.dumps({"version": version("xllamacpp")}), flush=True)
    for file in sys.argv[2:]:
        try:
            params = xllamacpp.CommonParams()
            params.model.path, params.n_ctx, params.verbosity = file, 256, -1
            server = xllamacpp.Server(params)
            asked = {"n_predict": count, "temperature": 0.0}
            told = [server.handle_completions({"prompt": prompt, **asked}) for prompt in prompts]
            found = {"texts": [each["choices"][0]["text"] for each in told]}
        except Exception as error:  # whatever a client says of a file is its row
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": file, **found}), flush=True)


if __name__ == "__main__":
    main()
