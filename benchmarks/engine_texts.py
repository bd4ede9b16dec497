"""Generate greedily with an engine; run by a Python that has it. Imports nothing of this package.

    python benchmarks/engine_texts.py ENGINE REQUEST ANSWER

ENGINE is transformers, vllm, openvino or onnx. Reads {"model", "prompts", "num_tokens"} as JSON
from the file REQUEST and writes {"release", "texts"} to ANSWER. The last two engines are handed
the model by the exporters of transformers: prompt and then token by token go through its graph for
decoding.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any


def load(folder: str) -> tuple[Any, Any]:
    """Load a checkpoint by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval(), AutoTokenizer.from_pretrained(folder, **options)


def by_transformers(folder: str, prompts: list[str], num_tokens: int) -> list[str]:
    """Generate by `generate`."""
    model, tokenizer = load(folder)
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def by_vllm(folder: str, prompts: list[str], num_tokens: int) -> list[str]:
    """Generate all prompts in one batch."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=len(prompts),
        enforce_eager=True,
        trust_remote_code=True,
    )
    settings = SamplingParams(temperature=0, max_tokens=num_tokens)
    return [answer.outputs[0].text for answer in engine.generate(prompts, settings, use_tqdm=False)]


def by_openvino(folder: str, prompts: list[str], num_tokens: int) -> list[str]:
    """Export a graph that keeps its cache itself, and feed it."""
    import numpy as np
    import openvino
    from transformers.exporters import OpenVINOConfig, OpenVINOExporter

    model, tokenizer = load(folder)
    with tempfile.TemporaryDirectory() as work:
        export(model, tokenizer, OpenVINOExporter(), OpenVINOConfig(dynamic=True), work)
        core, precision = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(f"{work}/openvino_decode.xml", "CPU", precision)
    names = {name for port in compiled.inputs for name in port.get_names()}
    texts = []
    for prompt in prompts:
        request = compiled.create_infer_request()

        def step(ids: list[int], done: int, request: Any = request) -> int:
            values = {**inputs_of(ids, done), "beam_idx": np.zeros(1, dtype=np.int32)}
            found = request.infer({name: values[name] for name in values.keys() & names})
            return int(found["logits"][0, -1].argmax())

        texts.append(decode(step, prompt, num_tokens, model, tokenizer))
    return texts


def by_onnx(folder: str, prompts: list[str], num_tokens: int) -> list[str]:
    """Export a graph whose cache goes in and out, and feed it."""
    import numpy as np
    import onnxruntime
    from transformers.exporters import OnnxConfig, OnnxExporter

    model, tokenizer = load(folder)
    with tempfile.TemporaryDirectory() as work:
        export(model, tokenizer, OnnxExporter(), OnnxConfig(dynamic=True), work)
        session = onnxruntime.InferenceSession(f"{work}/decode.onnx")
    inputs = {port.name: port for port in session.get_inputs()}
    outputs = [port.name for port in session.get_outputs()]
    cache_names = [name for name in inputs if name.startswith("input.cache.")]
    texts = []
    for prompt in prompts:
        shapes = {name: inputs[name].shape for name in cache_names}
        cache = {
            name: np.zeros((1, int(heads), 0, int(size)), dtype=np.float32)
            for name, (_, heads, _, size) in shapes.items()
        }

        def step(ids: list[int], done: int, cache: dict[str, Any] = cache) -> int:
            values = {**inputs_of(ids, done), **cache}
            found = session.run(None, {name: values[name] for name in inputs})
            named = dict(zip(outputs, found, strict=True))
            cache.update({name: named[name.replace("input", "output", 1)] for name in cache})
            return int(named["logits"][0, -1].argmax())

        texts.append(decode(step, prompt, num_tokens, model, tokenizer))
    return texts


def export(model: Any, tokenizer: Any, exporter: Any, config: Any, folder: str) -> None:
    """Export by transformers; a batch of one would fix the size of the batch."""
    inputs = tokenizer(["two prompts", "make a batch"], return_tensors="pt", padding=True)
    exported = exporter.export_for_generation(model, dict(inputs), config, multi_token_decode=True)
    exported.save_pretrained(folder)


def inputs_of(ids: list[int], done: int) -> dict[str, Any]:
    """Return what a decoding graph is fed: new ids, of which `done` came before."""
    import numpy as np

    end = done + len(ids)
    return {
        "input_ids": np.array([ids]),
        "position_ids": np.arange(done, end)[None],
        "attention_mask": np.ones((1, end), dtype=np.int64),
    }


def decode(
    step: Callable[[list[int], int], int], prompt: str, num_tokens: int, model: Any, tokenizer: Any
) -> str:
    """Feed a prompt and then each new token.

    Args:
        step: Called with ids and how many came before; returns the best next id.
        prompt: Text.
        num_tokens: Most tokens that are added.
        model: For the ids that end a text.
        tokenizer: Its tokenizer.
    """
    ends = model.generation_config.eos_token_id
    ids, done, new = tokenizer(prompt)["input_ids"], 0, []
    while len(new) < num_tokens:
        token = step(ids, done)
        new.append(token)
        if token in (ends if isinstance(ends, list) else [ends]):
            break
        done += len(ids)
        ids = [token]
    return tokenizer.decode(new, skip_special_tokens=True)


ENGINES = {
    "transformers": (by_transformers, "transformers"),
    "vllm": (by_vllm, "vllm"),
    "openvino": (by_openvino, "openvino"),
    "onnx": (by_onnx, "onnxruntime"),
}


def main() -> None:
    """Do what the module says."""
    engine, request, answer = sys.argv[1:]
    job = json.loads(Path(request).read_text(encoding="utf-8"))
    generate, module = ENGINES[engine]
    texts = generate(job["model"], job["prompts"], job["num_tokens"])
    found = {"release": installed(module), "texts": texts}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def installed(module: str) -> str:
    """Return the release of what a module came with; vllm has several names on PyPI."""
    names = packages_distributions().get(module, [module])
    return ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(names))


if __name__ == "__main__":
    main()
