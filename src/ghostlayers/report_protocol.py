"""Studies by dense model, and what of their protocol every kind of input says alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .report_data import SHORT_HASH, Gap, Study, short_name


class Studies:
    """Studies by dense model, and the labels of the texts that they were measured on."""

    def __init__(self) -> None:
        self.by_model: dict[str, Study] = {}
        self._texts: dict[str, str] = {}

    def of(self, model: str) -> Study:
        """Return the study of a dense model; begun if there is none.

        A comparison keeps only the last part of a local path: it names the same model as the one
        path that ends so, if there is no other.
        """
        key = model.rstrip("/") or model
        if key not in self.by_model:
            alike = [known for known in self.by_model if short_name(known) == short_name(key)]
            if len(alike) == 1 and "/" not in min(alike[0], key, key=len):
                return self.by_model[alike[0]]
        return self.by_model.setdefault(key, Study(key))

    def label(self, label: str, digest: str | None) -> str:
        """Return a label of windows that no other windows have."""
        known = self._texts.setdefault(label, digest or "")
        if digest is None or known == digest:
            return label
        return self.label(f"{label} (ids {digest[:SHORT_HASH]})", digest)


def add_protocol(
    study: Study, tasks: Mapping[str, Any] | None, speed: Mapping[str, Any] | None
) -> None:
    """Say how tasks and speed were measured, and which tasks were not run."""
    if tasks:
        names = ", ".join(
            f"{score['task']} ({score.get('num_fewshot') or 0}-shot, {score.get('items')} items)"
            for score in tasks["scores"]
        )
        limit = tasks.get("limit")
        limited = f"at most {limit} items each" if limit else "all items"
        release = f"lm-evaluation-harness {tasks['lm_eval']}" if tasks.get("lm_eval") else ""
        study.add_fact("Tasks", "; ".join(filter(None, [names, limited, release])))
        for task, reason in (tasks.get("not_run") or {}).items():
            gap = Gap(f"task {task}", f"not run: {reason}")
            if gap not in study.gaps:
                study.gaps.append(gap)
    if speed:
        parts = [f"{key} {speed[key]}" for key in ("device", "dtype", "threads") if key in speed]
        if "repeats" in speed:
            parts.append(f"median of {speed['repeats']} runs after {speed.get('warmup')}")
        if "new_tokens" in speed:
            parts.append(f"{speed['new_tokens']} new tokens")
        study.add_fact("Speed", "; ".join(parts) or "as `eval --speed`")


__all__ = ["Studies", "add_protocol"]
