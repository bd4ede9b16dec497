"""Generate greedily with llama.cpp; run as a file, by a Python that has xllamacpp.

Reads {"model", "prompts", "num_tokens", "threads"} as JSON from the file named by the first
argument and writes the texts as a JSON list to the second. Imports nothing of this package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Do what the module says."""
    import xllamacpp

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = 512
    params.cpuparams.n_threads = request["threads"]
    server = xllamacpp.Server(params)
    texts = []
    for prompt in request["prompts"]:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": request["num_tokens"],
                "temperature": 0,
                "top_k": 1,
                "cache_prompt": False,
            }
        )
        if isinstance(answer, str | bytes):
            answer = json.loads(answer)
        texts.append(answer["choices"][0]["text"])
    Path(sys.argv[2]).write_text(json.dumps(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
