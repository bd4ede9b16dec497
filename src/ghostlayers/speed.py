"""Time of prefill and of decode steps, as `generate` runs them, and the operators' part in it.

Prefill is the time from the call to the first token, a decode step the time between two tokens. The
device is synchronised at each. Operators are timed in runs of their own, since waiting for the
device around each of them would slow the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .decoder import decoder_layers, input_device, input_embeddings
from .model_checks import check_cache, evaluating
from .speed_results import SpeedResult, SpeedRow, SpeedSettings, check_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPERATOR_PLACES = ("ghost_input", "ghost_output")
MEMORY_NOTES = {
    "cuda": "peak of the memory that tensors had on the device, weights included",
    "cpu": "peak resident memory of the process so far: loading and earlier models included",
}


@dataclass
class _Clock(StoppingCriteria):
    """Notes the time after each token; stops nothing."""

    device: torch.device
    times: list[float] = field(default_factory=list)
    operators: list[float] = field(default_factory=lambda: [0.0])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_keywords: Any) -> Any:
        _synchronise(self.device)
        self.times.append(time.perf_counter())
        self.operators.append(0.0)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def measure_speed(
    model: PreTrainedModel, settings: SpeedSettings | None = None, *, seed: int = 0
) -> SpeedResult:
    """Time prefill and decode of a model on random token ids.

    Args:
        model: A causal LM, dense, pruned or recovered; where its weights are is where it runs.
        settings: What to time.
        seed: Seed of the ids.

    Returns:
        All times; `to_dict` has medians and spreads.

    Raises:
        GhostlayersError: If the prompts do not fit in the model.
        UnsupportedModelError: If the model cannot generate with a cache.
    """
    settings = settings or SpeedSettings()
    check_lengths(settings, model.config)
    check_cache(model)
    device = input_device(model)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    with evaluating(model):
        for batch_size in settings.batch_sizes:
            for length in settings.lengths:
                shape = (batch_size, length)
                ids = torch.randint(len(input_embeddings(model)), shape, generator=generator)
                rows.append(_measure(model, ids.to(device), settings))
    parameters = list(model.parameters())
    operators = _operators(model)
    facts = {
        "device": _device_name(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "num_layers": len(decoder_layers(model)),
        "parameters": sum(tensor.numel() for tensor in parameters),
        "parameter_bytes": sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        "operators": len(operators),
        "operator_parameters": sum(t.numel() for each in operators for t in each.parameters()),
    }
    note = MEMORY_NOTES.get(device.type, "not measured on this device")
    return SpeedResult(tuple(rows), settings, facts, note)


def _measure(model: PreTrainedModel, ids: torch.Tensor, settings: SpeedSettings) -> SpeedRow:
    for _ in range(settings.warmup):
        _run(model, ids, settings.new_tokens)
    _reset_peak(ids.device)
    timed = [_run(model, ids, settings.new_tokens) for _ in range(settings.repeats)]
    peak = _peak_memory(ids.device)
    clocks = []
    if _operators(model):
        clocks = [_run(model, ids, settings.new_tokens, operators=True) for _ in timed]
    return SpeedRow(
        batch_size=ids.shape[0],
        length=ids.shape[1],
        prefill=tuple(clock.times[1] - clock.times[0] for clock in timed),
        decode=tuple(
            late - early
            for clock in timed
            for early, late in zip(clock.times[1:], clock.times[2:], strict=False)
        ),
        operator_prefill=tuple(clock.operators[0] for clock in clocks) or (0.0,),
        operator_decode=tuple(step for clock in clocks for step in clock.operators[1:-1]) or (0.0,),
        peak_memory_bytes=peak,
    )


def _run(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, *, operators: bool = False
) -> _Clock:
    """Generate greedily; the clock starts at the call, and no end token ends it early."""
    clock = _Clock(ids.device)
    own = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)
    try:
        with _timed_operators(model, clock, on=operators):
            _synchronise(ids.device)
            clock.times.append(time.perf_counter())
            model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
    finally:
        model.generation_config = own
    return clock


@contextmanager
def _timed_operators(model: PreTrainedModel, clock: _Clock, *, on: bool) -> Iterator[None]:
    """Add the time of each operator to the token that it is run for."""
    started: list[float] = []

    def before(_module: nn.Module, _inputs: Any) -> None:
        _synchronise(clock.device)
        started.append(time.perf_counter())

    def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        _synchronise(clock.device)
        clock.operators[-1] += time.perf_counter() - started.pop()

    handles = []
    for operator in _operators(model) if on else []:
        handles.append(operator.register_forward_pre_hook(before))
        handles.append(operator.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _operators(model: PreTrainedModel) -> list[nn.Module]:
    named = model.named_modules()
    return [module for name, module in named if name.rpartition(".")[2] in OPERATOR_PLACES]


def _synchronise(device: torch.device) -> None:
    module: Any = getattr(torch, device.type)
    module.synchronize()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes there, KiB elsewhere


__all__ = ["measure_speed"]
