"""Train a pruned model's operators, or adapters, to say what the dense model says.

teacher -> top-K log-probabilities of every position, once, on disk
pruned model -> working copy, trained parameters in float32 -> loop -> best on held-out windows
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .calibration import Windows
from .decoder import input_device, input_embeddings
from .errors import CalibrationError, GhostlayersError, UnsupportedModelError, configured
from .evaluation import perplexity
from .finetune_config import FinetuneConfig
from .moments import held_out_windows
from .records import versions
from .teacher_logits import TeacherLogits, cache_teacher, weights_sha256
from .trained_parameters import (
    WorkingCopy,
    check_trainable,
    operator_parameters,
    own_random_state,
    with_changes,
    working_copy,
)
from .training import (
    STATE_FILE,
    Progress,
    Training,
    accelerator_for,
    held_out_divergence,
    resolve_precision,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FinetuneResult:
    """A distilled model and how it was made.

    Attributes:
        model: The model; it shares all tensors with the one given in, but for those in `changed`.
        history: A row per measurement: `step`, `train_kl`, `held_out_kl`, nats per position.
        record: JSON values: the key `finetune` of `ghostlayers.json`.
        changed: Parameters that hold new values; empty if nothing was better than the start.
    """

    model: PreTrainedModel
    history: list[dict[str, Any]]
    record: dict[str, Any]
    changed: frozenset[str]


def finetune(
    model: PreTrainedModel,
    teacher: PreTrainedModel | TeacherLogits,
    windows: Windows | torch.Tensor,
    config: FinetuneConfig | None = None,
    *,
    work: str | Path | None = None,
    on_step: Callable[[int], None] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
    **settings: Any,
) -> FinetuneResult:
    """Distil a dense model into a pruned one. The models given in are left untouched.

    The loss is the divergence of `divergence.top_k_divergence`, meant over all positions. Every
    fourth window is held out: what has the lowest divergence there is returned, and the model as
    given in is a candidate.

    Args:
        model: The pruned model, with operators unless `train` is lora.
        teacher: The dense model, or what `cache_teacher` made of it on these windows.
        windows: (n, T) int64 ids, n of 2 or more.
        config: Settings; or give them as keyword arguments of `FinetuneConfig`.
        work: Folder for the teacher's logits and the state; a later call with the same arguments
            goes on from the last measurement. None keeps no state.
        on_step: Called after every optimizer step with its number.
        on_row: Called with every new row of the history.
        progress: Show progress bars when standard error is a terminal.
        **settings: Fields of `FinetuneConfig`, such as ``steps=100``.

    Returns:
        The distilled model with its history and record.

    Raises:
        GhostlayersError: If there is nothing to train, or the divergence is not finite.
        UnsupportedModelError: If the vocabularies differ, or the model is quantized or offloaded.
        CalibrationError: If fewer than two windows are given.
        RequirementError: If `train` is lora and peft is not installed.

    Example:
        >>> import ghostlayers as gl                                              # doctest: +SKIP
        >>> result = gl.finetune(pruned, dense, windows, steps=100)               # doctest: +SKIP
    """
    config = config or configured(FinetuneConfig, settings)
    if isinstance(windows, torch.Tensor):
        windows = Windows(windows, "windows given in", bos_per_window=False)
    _check(model, teacher, windows, config)
    with nullcontext(work) if work is not None else tempfile.TemporaryDirectory() as folder:
        cache = _teacher_logits(teacher, windows, config, Path(folder), progress)
        state_file = None if work is None else Path(folder) / STATE_FILE
        hooks = {"on_step": on_step, "on_row": on_row, "progress": progress}
        return _train(model, cache, windows, config, state_file, hooks)


def _teacher_logits(
    teacher: PreTrainedModel | TeacherLogits,
    windows: Windows,
    config: FinetuneConfig,
    folder: Path,
    progress: bool,
) -> TeacherLogits:
    """Return the teacher's logits as given, or compute and keep them in the work folder."""
    if isinstance(teacher, TeacherLogits):
        return teacher
    folder.mkdir(parents=True, exist_ok=True)
    return cache_teacher(
        teacher,
        windows,
        folder / "teacher",
        top_k=config.top_k,
        batch_size=config.batch_size,
        replace_stale=True,
        progress=progress,
    )


def _check(
    model: PreTrainedModel,
    teacher: PreTrainedModel | TeacherLogits,
    windows: Windows,
    config: FinetuneConfig,
) -> None:
    what = f"the model ({type(model).__name__})"
    check_trainable(config, has_operators=bool(operator_parameters(model)), what=what)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            "the model is quantized: its low-bit weights cannot be trained or merged. Prune the "
            "unquantized model."
        )
    if windows.ids.ndim != 2 or windows.ids.shape[0] < 2:
        raise CalibrationError(
            f"windows of shape {tuple(windows.ids.shape)} leave none to hold out. Give (n, T) ids "
            "with n of 2 or more."
        )
    own, other = len(input_embeddings(model)), None
    if isinstance(teacher, TeacherLogits):
        other = teacher.key["vocabulary"]
        wanted = {"ids_sha256": windows.ids_sha256, "top_k": config.top_k}
        if differs := [name for name in wanted if teacher.key[name] != wanted[name]]:
            raise GhostlayersError(
                f"the teacher's logits are of another setting ({', '.join(differs)} differ). Make "
                "them by `cache_teacher` with these windows and this `top_k`."
            )
    else:
        other = len(input_embeddings(teacher))
    check_vocabulary(own, other)


def check_vocabulary(own: int, other: int) -> None:
    """Compare the vocabularies of student and teacher.

    Raises:
        UnsupportedModelError: If their sizes differ.
    """
    if own != other:
        raise UnsupportedModelError(
            f"the teacher's vocabulary has {other} tokens, the model's {own}. Allowed: the dense "
            "model that the checkpoint was made from."
        )


def _train(
    model: PreTrainedModel,
    cache: TeacherLogits,
    windows: Windows,
    config: FinetuneConfig,
    state_file: Path | None,
    hooks: dict[str, Any],
) -> FinetuneResult:
    device = input_device(model)
    precision = resolve_precision(config, device)
    held_out = held_out_windows(len(windows.ids))
    trained = [window for window in range(len(windows.ids)) if window not in set(held_out)]
    with (
        own_random_state(config.seed, device),
        accelerator_for(device, config, precision) as accelerator,
    ):
        processes = accelerator.num_processes
        if processes > 1:
            device = accelerator.device
            model.to(device)
        working = working_copy(model, config, autocast=precision == "bf16")
        key = [cache.key, config.to_dict(), weights_sha256(model), processes]
        training = Training(
            working,
            windows.ids,
            cache,
            trained,
            held_out,
            config,
            device,
            state_file,
            hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest(),
            **hooks,
        )
        done = training.run(accelerator)
    best, changed, measured = _best(model, working, done, training)
    record = {
        "config": config.to_dict(),
        "teacher": dict(cache.key),
        "calibration": windows.record(),
        "held_out_windows": held_out,
        "precision": precision,
        "processes": processes,
        "trained_parameters": sum(p.numel() for p in working.parameters.values()),
        "steps": done.step,
        "best_step": done.best_step if changed else 0,
        **measured,
        "history": done.history,
        "versions": _versions(config),
    }
    return FinetuneResult(best, done.history, record, changed)


def _best(
    model: PreTrainedModel, working: WorkingCopy, done: Progress, training: Training
) -> tuple[PreTrainedModel, frozenset[str], dict[str, Any]]:
    """Build the best model in its own dtype, and keep the start where that is not better."""
    config, ids = training.config, training.ids[training.held_out]

    def measure(of: PreTrainedModel) -> tuple[float, float]:
        with torch.no_grad():
            kl = held_out_divergence(
                of, training.ids, training.cache, training.held_out, config.batch_size
            )
        scored = perplexity(of, ids, batch_size=config.batch_size, progress=False)
        return kl, scored.perplexity

    was_training = model.training
    model.eval()
    best, changed, before = model, frozenset[str](), measure(model)
    after = before
    if done.best_step > 0:
        working.load_(done.best)
        candidate, names = with_changes(model, working.changed_values())
        found = measure(candidate)
        if found[0] < before[0]:
            best, changed, after = candidate, names, found
    model.train(was_training)
    return (
        best,
        changed,
        {
            "held_out_kl_before": before[0],
            "held_out_kl_after": after[0],
            "held_out_perplexity_before": before[1],
            "held_out_perplexity_after": after[1],
        },
    )


def _versions(config: FinetuneConfig) -> dict[str, str]:
    used = ("accelerate", "peft") if config.train == "lora" else ("accelerate",)
    return {**versions(), **{package: version(package) for package in used}}
