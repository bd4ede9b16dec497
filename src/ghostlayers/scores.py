"""What the first sweep measured, to be used again: `analyze --save`, `prune --scores`.

Scores know which model and which calibration they are from; both are compared before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .calibration import Windows, resolve_window
from .config import PruneConfig
from .errors import CalibrationError, CheckpointError
from .fingerprint import fingerprint
from .records import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .recoverability import Recoverability
    from .selection import Measured

# Settings that a run takes from the scores unless it names them.
CALIBRATION_SETTINGS = ("calibration", "num_windows", "window")
INHERITED_SETTINGS = (*CALIBRATION_SETTINGS, "batch_size", "dtype", "seed", "cosine_over")
FINGERPRINTS = {"config_sha256": "config", "weights_sha256": "weights"}


@dataclass(frozen=True)
class Scores:
    """What the first sweep gives to selectors and operators, and what it was measured on.

    Attributes:
        measured: Similarities and massive tokens.
        windows: The calibration windows.
        model: The model's `fingerprint`.
        dtype: The dtype in which the model was measured.
        settings: Those of `INHERITED_SETTINGS`, as they were given.
        versions: Of the packages that measured.
        recoverability: Errors of every contiguous cut, if measured.
    """

    measured: Measured
    windows: Windows
    model: Mapping[str, str]
    dtype: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    recoverability: Recoverability | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        config: PruneConfig,
        windows: Windows,
        measured: Measured,
        recoverability: Recoverability | None = None,
    ) -> Scores:
        """Put together what was measured on a model."""
        return cls(
            measured=measured,
            windows=windows,
            model=fingerprint(model),
            dtype=_dtype(model),
            settings={name: getattr(config, name) for name in INHERITED_SETTINGS},
            versions=versions(),
            recoverability=recoverability,
        )

    def settings_with(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings, those that are not given as they were when the scores were measured."""
        return {"cosine_over": "channels", **self.settings, **given}

    def check_settings(self, config: PruneConfig) -> None:
        """Refuse settings that say what the scores are, where they differ.

        Raises:
            CheckpointError: If the cosines are of another kind; both values are named.
        """
        measured = self.settings.get("cosine_over", "channels")
        if config.cosine_over != measured:
            raise CheckpointError(
                f"the scores are cosines over {measured}, `cosine_over` is {config.cosine_over}. "
                "Leave it out, or measure again with `analyze --save`."
            )

    def record(self) -> dict[str, Any]:
        """Return where a result's scores come from, as JSON values."""
        return {"model": dict(self.model), "dtype": self.dtype, "versions": dict(self.versions)}

    def check_model(self, model: PreTrainedModel, found: Mapping[str, str] | None = None) -> None:
        """Refuse a model that these scores were not measured on.

        Args:
            model: The model.
            found: Its `fingerprint`, if it is known.

        Raises:
            CheckpointError: If its dtype, config or weights are others; both values are named.
        """
        if _dtype(model) != self.dtype:
            raise CheckpointError(
                f"the scores are of the model in {self.dtype}, this one is in {_dtype(model)}. Use "
                f"`dtype` {self.dtype}, or measure again with `analyze --save`."
            )
        found = fingerprint(model) if found is None else found
        wrong = [name for name in FINGERPRINTS if found[name] != self.model[name]]
        if wrong:
            differ = ", ".join(
                f"{FINGERPRINTS[name]} sha256 {self.model[name][:12]}, this model's is "
                f"{found[name][:12]}"
                for name in wrong
            )
            raise CheckpointError(
                f"the scores are of another model: {differ}.{self._other_release()} Measure this "
                "model with `analyze --save`."
            )

    def _other_release(self) -> str:
        then, now = self.versions.get("transformers"), versions()["transformers"]
        return "" if then == now else f" (Measured with transformers {then}, this is {now}.)"

    def check_sampled(self, config: PruneConfig, model_config: Any) -> None:
        """Refuse other settings of calibration text that the model sampled itself.

        Sampling again would give the same windows, so the settings are compared instead.

        Raises:
            CalibrationError: If the scores are of other windows.
        """
        window = resolve_window(config.window, model_config)
        asked = {"source": config.calibration, "windows": config.num_windows, "window": window}
        asked["sampler_seed"] = config.seed
        record = self.windows.record()
        if any(record.get(name) != value for name, value in asked.items()):
            raise self._other_calibration(
                f"{config.calibration}, {config.num_windows} windows of {window} tokens, seed "
                f"{config.seed}"
            )

    def check_windows(self, windows: Windows) -> None:
        """Refuse windows that these scores were not measured on.

        Raises:
            CalibrationError: If their token ids or their shape differ; both are named.
        """
        same_shape = windows.ids.shape == self.windows.ids.shape  # the hash does not know it
        if not same_shape or windows.ids_sha256 != self.windows.ids_sha256:
            raise self._other_calibration(_described(windows))

    def _other_calibration(self, asked: str) -> CalibrationError:
        return CalibrationError(
            f"the scores are of another calibration: {_described(self.windows)}; asked for: "
            f"{asked}. Leave out the calibration settings to use those of the scores, or measure "
            "again with `analyze --save`."
        )

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the scores; the file appears when it is complete.

        Args:
            path: File to write.
            force: Replace it if it exists.

        Raises:
            CheckpointError: If it exists without `force`, or cannot be written.
        """
        from .scores_file import save_scores

        return save_scores(self, path, force=force)


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _described(windows: Windows) -> str:
    count, window = windows.ids.shape
    return (
        f"{windows.source}, {count} windows of {window} tokens, ids sha256 "
        f"{windows.ids_sha256[:12]}"
    )


def windows_of_run(
    config: PruneConfig,
    model_config: Any,
    windows: Windows | None,
    scores: Scores | None,
    *,
    stored: bool,
    made: Callable[[], Windows],
) -> Windows:
    """Return the windows of a run; with scores those of the scores, if they are the same.

    Args:
        config: Settings.
        model_config: The model's config.
        windows: Windows given in, if any.
        scores: Scores given in, if any.
        stored: Take those of the scores without comparing: no calibration setting was given.
        made: Makes the windows that the settings ask for.

    Raises:
        CalibrationError: If the scores are of other windows, or a window has no token to predict.
    """
    if windows is None and scores is not None and (stored or config.calibration == "self"):
        if not stored:
            scores.check_sampled(config, model_config)
        scores.windows.require_targets()
        return scores.windows
    windows = made() if windows is None else windows
    windows.require_targets()
    if scores is not None:
        scores.check_windows(windows)
    return windows
