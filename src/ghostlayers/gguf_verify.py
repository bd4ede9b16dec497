"""Compare what llama.cpp generates from a GGUF file with what transformers does."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import llama_cpp_generate
from .errors import CheckpointError
from .loading import load_model, load_tokenizer, locate
from .tool_environments import last_line

PROMPTS = ("The capital of France is", "Once upon a time", "def add(a, b):")
NEW_TOKENS = 24
RUN_SECONDS = 3600


def verify_gguf(file: Path, checkpoint: Path, python: Path) -> dict[str, Any]:
    """Generate greedily from both, in float32, and compare the texts.

    Args:
        file: GGUF file of float32 weights.
        checkpoint: The folder it was made from.
        python: A Python that has xllamacpp.

    Returns:
        JSON values: how many prompts and tokens were equal.

    Raises:
        CheckpointError: If llama.cpp cannot run the file, or a text differs.
    """
    found = llama_cpp_texts(file, python)
    expected = transformers_texts(checkpoint)
    for prompt, ours, theirs in zip(PROMPTS, expected, found, strict=True):
        if ours != theirs:
            raise CheckpointError(
                f"llama.cpp does not generate what transformers does: after {prompt!r} it says "
                f"{theirs!r}, transformers says {ours!r}. Nothing was written."
            )
    return {"prompts": len(PROMPTS), "new_tokens": NEW_TOKENS, "texts": found}


def llama_cpp_texts(file: Path, python: Path, prompts: Sequence[str] = PROMPTS) -> list[str]:
    """Generate with llama.cpp, greedily.

    Raises:
        CheckpointError: If it fails.
    """
    with tempfile.TemporaryDirectory() as work:
        request, answer = Path(work) / "request.json", Path(work) / "answer.json"
        job: dict[str, Any] = {
            "model": str(file),
            "prompts": list(prompts),
            "num_tokens": NEW_TOKENS,
        }
        job["threads"] = torch.get_num_threads()
        request.write_text(json.dumps(job))
        try:
            run = subprocess.run(
                [str(python), "-I", str(llama_cpp_generate.__file__), str(request), str(answer)],
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(
                f"llama.cpp has not answered within {RUN_SECONDS} s. Export without --verify."
            ) from error
        if run.returncode or not answer.is_file():
            raise CheckpointError(f"llama.cpp cannot run the file ({_reason(run.stderr)}).")
        texts: list[str] = json.loads(answer.read_text(encoding="utf-8"))
    return texts


def _reason(stderr: str) -> str:
    """Return the first error that llama.cpp logged, else the last line."""
    errors = [line for line in stderr.splitlines() if " E " in line or "error loading" in line]
    return last_line(errors[0] if errors else stderr)


def transformers_texts(checkpoint: Path, prompts: Sequence[str] = PROMPTS) -> list[str]:
    """Generate with transformers, float32, greedily whatever the checkpoint's own settings."""
    from transformers import GenerationConfig

    source = locate(str(checkpoint))
    model, tokenizer = load_model(source, dtype="float32", device="cpu"), load_tokenizer(source)
    own: Any = model.generation_config
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    model.generation_config = settings
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        prompt_ids = inputs["input_ids"]
        generated: Any = model.generate(  # type: ignore[operator]
            prompt_ids, attention_mask=inputs["attention_mask"], generation_config=settings
        )
        new = generated[0, prompt_ids.shape[1] :]
        texts.append(str(tokenizer.decode(new, skip_special_tokens=True)))
    return texts
