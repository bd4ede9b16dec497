"""The training loop of a distillation, and its state on disk."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .divergence import top_k_divergence
from .errors import CheckpointError, GhostlayersError
from .finetune_config import FinetuneConfig
from .teacher_logits import TeacherLogits
from .trained_parameters import WorkingCopy

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE_FILE = "training.pt"


@dataclass
class Progress:
    """How far a training run is.

    Attributes:
        step: Optimizer steps done.
        history: A row per measurement: `step`, `train_kl` (mean since the row before, null in the
            first), `held_out_kl`.
        best_step: Step of the lowest held-out divergence; 0 is the start.
        best_kl: That divergence, nats per position.
        best: The trained parameters then.
        stale: Measurements since then.
    """

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    best_kl: float = math.inf
    best: dict[str, Tensor] = field(default_factory=dict)
    stale: int = 0

    def measured(self, train_kl: float | None, held_out_kl: float, copy: WorkingCopy) -> None:
        """Add a measurement."""
        if not math.isfinite(held_out_kl):
            raise GhostlayersError(
                f"the held-out divergence is {held_out_kl} after step {self.step}: check "
                "the weights, lower `learning_rate`, or use `mixed_precision` no."
            )
        row = {"step": self.step, "train_kl": train_kl, "held_out_kl": held_out_kl}
        self.history.append(row)
        self.stale += 1
        if held_out_kl < self.best_kl:
            self.best_step, self.best_kl, self.stale = self.step, held_out_kl, 0
            self.best = copy.state()


@contextmanager
def accelerator_for(device: torch.device, config: FinetuneConfig, precision: str) -> Iterator[Any]:
    """Make an `Accelerator`; its settings, which are global, go with it unless they were there."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, is_initialized

    is_ours = not is_initialized()
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        device_placement=False,
        mixed_precision=precision,
        gradient_accumulation_steps=config.accumulation,
    )
    alone = accelerator.num_processes == 1
    try:
        yield accelerator
    finally:
        if is_ours:
            AcceleratorState._reset_state(reset_partial_state=alone)


def resolve_precision(config: FinetuneConfig, device: torch.device) -> str:
    """Return accelerate's name of the precision that the settings mean on a device."""
    if config.mixed_precision != "auto":
        return config.mixed_precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "no"


def num_steps(config: FinetuneConfig, num_trained: int, processes: int) -> int:
    """Return the number of optimizer steps."""
    per_step = config.batch_size * config.accumulation * processes
    return config.steps or max(1, math.ceil(config.epochs * num_trained / per_step))


def window_order(windows: list[int], count: int, seed: int) -> list[int]:
    """Return `count` windows: one random permutation after another."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < count:
        order += [windows[i] for i in torch.randperm(len(windows), generator=generator).tolist()]
    return order[:count]


@torch.no_grad()
def held_out_divergence(
    net: Any, ids: Tensor, cache: TeacherLogits, held_out: list[int], batch_size: int
) -> float:
    """Mean divergence over all positions of the held-out windows, in nats."""
    device = next(net.parameters()).device
    total = 0.0
    for start in range(0, len(held_out), batch_size):
        batch = collate(held_out[start : start + batch_size], ids, cache, device)
        total += float(_divergence(net, *batch).double().sum())
    return total / (len(held_out) * ids.shape[1])


def collate(
    windows: list[int], ids: Tensor, cache: TeacherLogits, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids (B, T), and the teacher's log-probabilities and tokens (B, T, K)."""
    parts = [cache.read(window) for window in windows]
    return (
        ids[windows].to(device),
        torch.stack([log_probs for log_probs, _ in parts]).to(device),
        torch.stack([tokens for _, tokens in parts]).to(device),
    )


def _divergence(net: Any, ids: Tensor, log_probs: Tensor, tokens: Tensor) -> Tensor:
    return top_k_divergence(net(input_ids=ids, use_cache=False).logits, log_probs, tokens)


@dataclass
class Training:
    """One run of the loop.

    Attributes:
        copy: The model under training.
        ids: (n, T) windows.
        cache: The teacher on them.
        trained: Windows to train on.
        held_out: Windows to measure on.
        config: Settings.
        device: Where the model is.
        state_file: Where to keep the state, or None.
        digest: What the state must have been made of.
        on_step: Called after every optimizer step with its number.
        on_row: Called with every new row of the history.
        progress: Show a progress bar when standard error is a terminal.
    """

    copy: WorkingCopy
    ids: Tensor
    cache: TeacherLogits
    trained: list[int]
    held_out: list[int]
    config: FinetuneConfig
    device: torch.device
    state_file: Path | None = None
    digest: str = ""
    on_step: Callable[[int], None] | None = None
    on_row: Callable[[dict[str, Any]], None] | None = None
    progress: bool = True

    def run(self, accelerator: Accelerator) -> Progress:
        """Train until the last step, or until the held-out divergence stops falling.

        Raises:
            GhostlayersError: If the divergence is not finite.
        """
        from transformers import get_cosine_schedule_with_warmup

        config, done = self.config, Progress()
        parameters = list(self.copy.parameters.values())
        optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        per_step = config.batch_size * config.accumulation * accelerator.num_processes
        total = num_steps(config, len(self.trained), accelerator.num_processes)
        schedule = get_cosine_schedule_with_warmup(optimizer, round(config.warmup * total), total)
        self._resume(done, optimizer, schedule)
        order = window_order(self.trained, total * per_step, config.seed)[done.step * per_step :]
        net: Any = accelerator.prepare_model(self.copy.net, device_placement=False)
        wrapped: Any = accelerator.prepare_optimizer(optimizer, device_placement=False)
        if not done.history:
            self._measure(accelerator, net, done, None)
            self._save(accelerator, done, optimizer, schedule)
        if done.stale >= config.patience or not order:
            return done
        losses: list[Tensor] = []
        bar = tqdm(total=total, initial=done.step, disable=None if self.progress else True)
        for batch in accelerator.prepare_data_loader(self._loader(order), device_placement=False):
            with accelerator.accumulate(net):
                loss = _divergence(net, *batch).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(parameters, config.max_grad_norm)
                wrapped.step()
                wrapped.zero_grad()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            schedule.step()
            done.step += 1
            bar.update()
            if done.step % config.eval_every == 0 or done.step == total:
                self._measure(accelerator, net, done, torch.stack(losses).mean())
                self._save(accelerator, done, optimizer, schedule)
                losses.clear()
            if self.on_step is not None:
                self.on_step(done.step)
            if done.stale >= config.patience:
                break
        bar.close()
        return done

    def _loader(self, order: list[int]) -> DataLoader[Any]:
        return DataLoader(
            order,  # type: ignore[arg-type]
            batch_size=self.config.batch_size,
            collate_fn=lambda windows: collate(windows, self.ids, self.cache, self.device),
        )

    def _measure(
        self, accelerator: Accelerator, net: nn.Module, done: Progress, train_kl: Tensor | None
    ) -> None:
        from accelerate.utils import broadcast_object_list

        kl = held_out_divergence(net, self.ids, self.cache, self.held_out, self.config.batch_size)
        if train_kl is not None:
            train_kl = accelerator.reduce(train_kl, reduction="mean")
        # Every process must stop at the same step.
        row: list[Any] = [None if train_kl is None else float(train_kl), kl]
        train, held_out = broadcast_object_list(row)
        done.measured(train, held_out, self.copy)
        if self.on_row is not None:
            self.on_row(done.history[-1])

    def _save(
        self, accelerator: Accelerator, done: Progress, optimizer: Any, schedule: Any
    ) -> None:
        """Write the state; the file is replaced in one step."""
        if self.state_file is None or not accelerator.is_main_process:
            return
        state = {
            "digest": self.digest,
            "progress": vars(done),
            "parameters": self.copy.state(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "random": torch.get_rng_state(),
        }
        part = self.state_file.with_suffix(".part")
        try:
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.state_file)
        except (OSError, RuntimeError) as error:  # the latter is torch's word for a full disk
            part.unlink(missing_ok=True)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"the state of the training cannot be written to {str(part.parent)!r} ({reason}). "
                "Free some space and start again: it goes on from the last state."
            ) from error

    def _resume(self, done: Progress, optimizer: Any, schedule: Any) -> None:
        if self.state_file is None or not self.state_file.is_file():
            return
        try:
            state = torch.load(self.state_file, map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and torch have their own classes
            raise CheckpointError(
                f"{self.state_file} is damaged ({type(error).__name__}). Delete it to start over."
            ) from error
        if state["digest"] != self.digest:
            warnings.warn(
                f"{self.state_file} is of other models, windows or settings; starting over.",
                stacklevel=3,
            )
            return
        vars(done).update(state["progress"])
        self.copy.load_(state["parameters"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
