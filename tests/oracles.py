"""Tiny random models and the three oracles by which a cut is judged.

Weights are re-drawn, norms included: with the default initialisation many faults disappear.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen3Config,
)

from ghostlayers.decoder import decoder_layers
from ghostlayers.sweep import hidden_state

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    **SPECIAL,
}


def tiny_config(family: str, num_layers: int = 8):
    """Return a small config of one of five families."""
    if family == "llama":
        return LlamaConfig(num_hidden_layers=num_layers, **COMMON)
    if family == "qwen3":
        return Qwen3Config(num_hidden_layers=num_layers, head_dim=16, **COMMON)
    if family == "gemma3":
        return Gemma3TextConfig(
            num_hidden_layers=num_layers,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=16,
            layer_types=[
                "full_attention" if layer % 3 == 2 else "sliding_attention"
                for layer in range(num_layers)
            ],
            **COMMON,
        )
    if family == "gpt2":
        return GPT2Config(n_layer=num_layers, n_embd=64, n_head=4, vocab_size=256, **SPECIAL)
    return OPTConfig(
        num_hidden_layers=num_layers,
        ffn_dim=128,
        word_embed_proj_dim=64,
        **{key: COMMON[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")},
        **SPECIAL,
    )


FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "opt")


@torch.no_grad()
def redraw_(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw matrices from N(0, 0.1) and add N(0, 0.2) to every norm weight."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(0.1 * noise)
        else:
            parameter.add_(0.2 * noise)
    return model.eval()


def tiny_model(family: str = "llama", num_layers: int = 8, **changes) -> PreTrainedModel:
    """Build a small random model in evaluation mode."""
    config = tiny_config(family, num_layers)
    for name, value in changes.items():
        setattr(config, name, value)
    return redraw_(AutoModelForCausalLM.from_config(config))


def random_ids(batch: int = 2, length: int = 40, seed: int = 1) -> torch.Tensor:
    """Draw token ids that avoid the special tokens."""
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a forward pass without a cache."""
    return model(input_ids=ids, use_cache=False).logits


# Second outputs that some layers hand on to the next layer come in under these names.
HANDED_ON = ("prev_topk_indices", "prev_router_hidden_states")


class _PassThrough(nn.Module):
    """Stands in for a removed layer: gives back what it was given."""

    def __init__(self, layer: nn.Module, prototype) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule
        self.prototype = prototype

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)  # what the model's forward asks of it

    def forward(self, hidden_states, *args, **kwargs):
        if not isinstance(self.prototype, list | tuple):
            return hidden_states
        rest = [None] * (len(self.prototype) - 1)
        if rest and isinstance(self.prototype[1], torch.Tensor):
            handed_on = [kwargs[name] for name in HANDED_ON if name in kwargs]
            rest[0] = (handed_on or args[:1] or [None])[0]
        return type(self.prototype)([hidden_states, *rest])


def identity_reference(
    dense: PreTrainedModel, removed: list[int], ids: torch.Tensor, operators=None
) -> torch.Tensor:
    """O1: logits of the dense model with removed layers swapped for pass-throughs.

    Args:
        dense: The dense model; left as it is.
        removed: Layers to pass through.
        ids: (B, T) token ids.
        operators: `{stop: (C, C) matrix M}` applied as x + xM to the state that enters layer
            `stop`, or that leaves the last layer when `stop` is the depth.
    """
    model = copy.deepcopy(dense)
    layers = decoder_layers(model)
    depth = len(layers)
    returned = {}
    handles = [
        layer.register_forward_hook(lambda _m, _a, out, i=i: returned.__setitem__(i, out))
        for i, layer in enumerate(layers)
    ]
    logits(model, ids)
    for handle in handles:
        handle.remove()
    for layer in removed:
        layers[layer] = _PassThrough(layers[layer], returned[layer])

    def before(matrix):
        def hook(_module, args, kwargs):
            if args:
                return (args[0] + args[0] @ matrix, *args[1:]), kwargs
            state = kwargs["hidden_states"]
            return args, {**kwargs, "hidden_states": state + state @ matrix}

        return hook

    def after(matrix):
        def hook(_module, _args, output):
            state = hidden_state(output)
            new = state + state @ matrix
            return (
                (new, *output[1:])
                if isinstance(output, tuple)
                else [new, *output[1:]]
                if isinstance(output, list)
                else new
            )

        return hook

    for stop, matrix in (operators or {}).items():
        if stop < depth:
            layers[stop].register_forward_pre_hook(before(matrix), with_kwargs=True)
        else:
            layers[-1].register_forward_hook(after(matrix))
    return logits(model, ids)


@torch.no_grad()
def step_error(model: PreTrainedModel, ids: torch.Tensor, prefix: int = 34, cache=None) -> float:
    """O2: largest difference between stepping with a cache and one forward without it."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    positions = torch.arange(ids.shape[1])[None].expand(ids.shape[0], -1)
    position_ids = "position_ids" in parameters
    extra = {"position_ids": positions} if position_ids else {}
    whole = model(input_ids=ids, use_cache=False, **extra).logits
    parts: list[torch.Tensor] = []
    stops = [prefix, *range(prefix + 1, ids.shape[1] + 1)]
    for start, stop in zip([0, *stops], stops, strict=False):
        inputs = {"input_ids": ids[:, start:stop], "use_cache": True}
        if position_ids:
            inputs["position_ids"] = positions[:, start:stop]
        if cache is not None:
            inputs[name] = cache
        out = model(**inputs)
        cache = getattr(out, name, None) or getattr(out, "past_key_values", None) or cache
        if cache is None:  # recurrent_gemma returns none unless it is given one
            return step_error(model, ids, prefix, DynamicCache(config=model.config))
        parts.append(out.logits)
    return float((torch.cat(parts, dim=1) - whole).abs().max())


def reload(folder: Path, **keywords) -> PreTrainedModel:
    """O3: load in a fresh object; no missing, unexpected or mismatched key."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **keywords)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    return model.eval()


def watched_ladders(monkeypatch):
    """Return a list that gets the ladders of every call of the guard, as lists of repairs."""
    from ghostlayers import recovered

    seen, judge = [], recovered.judge_repairs

    def judged(model, pruned, plan, ladders, *args, **settings):
        seen.append(list(ladders.values()))
        return judge(model, pruned, plan, ladders, *args, **settings)

    monkeypatch.setattr(recovered, "judge_repairs", judged)
    return seen
