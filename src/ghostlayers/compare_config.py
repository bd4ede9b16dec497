"""`CompareConfig`: the settings of `ghostlayers compare`, checked; imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .budget_values import parse_quantity
from .config import FITS, PruneConfig
from .errors import GhostlayersError, unknown_name
from .operators import GUARDED, NO_OPERATOR, RANKED, operator_names
from .text_sources import check_source

# Fields of `PruneConfig` that a comparison takes as they are, one value for the whole grid.
SHARED_FIELDS = (
    *("ridge", "rank", "refine", "fold_maps", "moments_device", "num_clusters", "plus"),
    *("score_windows", "score_window"),
    *("laco_layers", "laco_interval", "laco_range", "laco_threshold"),
    *("cosine_over", "protect_first", "protect_last"),
    *("window", "batch_size", "dtype", "device", "seed"),
)
# What may differ between a run and its continuation.
VOLATILE_FIELDS = ("device", "moments_device", "moments_memory", "states_memory")
DEFAULT_TEXT = "wikitext2"
GIVEN_LAYERS = "layers"


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True)
class CompareConfig:
    """Settings of one comparison: a grid of calibrations, cuts and operators.

    Tuples are lists split by commas on the command line (`layers`: by semicolons).

    Raises:
        GhostlayersError: At construction, with every fault in one message.
    """

    num_remove: tuple[int, ...] = _option((), "numbers of layers to remove")
    layers: tuple[str, ...] = _option((), "cuts given by their layers, split by semicolons")
    select: tuple[str, ...] = _option(("lorp", "shortgpt", "streamline"), "selectors")
    recover: tuple[str, ...] = _option(
        (NO_OPERATOR, "linearpatch-rotate", "replaceme-lstsq", "ghost"), "operators"
    )
    fit: tuple[str, ...] = _option(("dense",), f"states to fit on: {', '.join(FITS)}")
    calibration: tuple[str, ...] = _option(("self",), "calibration texts, as for prune")
    num_windows: tuple[int, ...] = _option((128,), "numbers of calibration windows")
    perplexity: tuple[str, ...] = _option(
        (), f"texts to score (default: {DEFAULT_TEXT}, unless there are tasks or speed)"
    )
    eval_window: int | None = _option(None, "tokens per scored window (default: 2048, or ...)")
    eval_windows: int | None = _option(None, "windows scored of each text (default: all)")
    tasks: str | None = _option(None, "tasks of lm-evaluation-harness, as for eval")
    include_path: str | None = _option(None, "folder of further task files (.yaml)")
    limit: int | None = _option(None, "items per task (default: all)")
    num_fewshot: int | None = _option(None, "examples per item (default: the task's)")
    speed: bool = _option(False, "time prefill and decode of every cell")
    speed_batch_sizes: str = _option("1,4", "sequences at once, split by commas")
    speed_lengths: str = _option("64,256", "tokens of the prompt, split by commas")
    speed_new_tokens: int = _option(32, "tokens generated after each prompt")
    speed_repeats: int = _option(5, "timed runs of each")
    speed_warmup: int = _option(2, "runs before those, not timed")
    moments_memory: str = _option("2GiB", "memory for the moments of one sweep")
    states_memory: str = _option("4GiB", "memory for states in front of cuts")
    save_checkpoints: bool = _option(False, "write the checkpoint of every cell")
    shared: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        faults = _number_faults(self) + _name_faults(self)
        for name in ("moments_memory", "states_memory"):
            try:
                parse_quantity("target_bytes", getattr(self, name))
            except GhostlayersError as error:
                faults.append(str(error).replace("target_bytes", name))
        for source in (*self.calibration, *self.perplexity):
            if source != "self" or source in self.perplexity:
                faults += _errors_of(lambda source=source: check_source(source))
        if not faults:
            for select in self.select or ("lorp",):
                for windows in self.num_windows:
                    faults += _errors_of(lambda s=select, n=windows: self._probe(s, n))
        if faults:
            raise GhostlayersError("; ".join(dict.fromkeys(faults)) + ".")

    def _probe(self, select: str, num_windows: int) -> None:
        self.prune_config(num_remove=1, select=select, num_windows=num_windows)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts to score."""
        if self.perplexity or self.tasks is not None or self.speed:
            return self.perplexity
        return (DEFAULT_TEXT,)

    @property
    def batch_size(self) -> int:
        """Windows, or requests of tasks, per forward pass."""
        return int(dict(self.shared).get("batch_size", 1))

    def memory(self, name: str) -> int:
        """Return `moments_memory` or `states_memory` in bytes."""
        return parse_quantity("target_bytes", getattr(self, name))

    def prune_config(self, **settings: Any) -> PruneConfig:
        """Return the settings with which `prune` would make one cell.

        Args:
            **settings: A budget, and `select`, `recover`, `fit`, `calibration`, `num_windows`.
        """
        shared = dict(self.shared)
        for name, operators in (("rank", RANKED), ("refine", GUARDED)):
            if settings.get("recover", NO_OPERATOR) not in operators:
                shared.pop(name, None)
        if "recover" not in settings:
            settings["recover"] = NO_OPERATOR
        return PruneConfig(**{**shared, **settings})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, shared ones in their place."""
        values = asdict(self)
        shared = dict(values.pop("shared"))
        defaults = {item.name: item.default for item in fields(PruneConfig)}
        return {**values, **{name: shared.get(name, defaults[name]) for name in SHARED_FIELDS}}


def make_config(values: dict[str, Any]) -> CompareConfig:
    """Make a configuration of flat settings; a single value stands for a list of one.

    Raises:
        GhostlayersError: If a key is unknown or a value is not allowed; all faults in one message.
    """
    own = {item.name: item for item in fields(CompareConfig) if item.name != "shared"}
    faults, settings, shared = [], dict[str, Any](), dict[str, Any]()
    for name, value in values.items():
        if name in SHARED_FIELDS:
            shared[name] = value
        elif name not in own:
            faults.append(str(unknown_name("setting", name, (*own, *SHARED_FIELDS))).rstrip("."))
        elif isinstance(own[name].default, tuple):
            settings[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
        else:
            settings[name] = value
    kinds = {item.name: str(item.type) for item in (*fields(PruneConfig), *own.values())}
    faults += [
        f"`{name}` is {value!r}; allowed: {kinds[name].replace(' | ', ' or ')}"
        for name, value in {**settings, **shared}.items()
        if not _is_of(kinds[name], value)
    ]
    if faults:
        raise GhostlayersError("; ".join(faults) + ".")
    return CompareConfig(**settings, shared=tuple(shared.items()))


def smoke_config(config: CompareConfig, depth: int, text: str, given: set[str]) -> CompareConfig:
    """Return the same grid at tiny sizes, on texts that need no network.

    Args:
        config: Settings.
        depth: Number of decoder layers of the model that runs.
        text: A local text that stands for those that are no local files.
        given: Settings of the command line: they stay as they are.
    """

    def local(names: tuple[str, ...]) -> tuple[str, ...]:
        files = tuple(name if Path(name).is_file() else text for name in names)
        return tuple(dict.fromkeys(files))

    largest = max(1, depth - 2)
    tiny: dict[str, Any] = {
        "num_remove": tuple(
            dict.fromkeys(max(1, min(largest, k * depth // 40)) for k in config.num_remove)
        ),
        "layers": (),
        "calibration": local(config.calibration),
        "num_windows": tuple(
            dict.fromkeys(min(n, 4 + i) for i, n in enumerate(config.num_windows))
        ),
        "perplexity": local(config.texts) or (() if config.speed else (text,)),
        "eval_window": 64,
        "eval_windows": 2,
        "tasks": config.tasks if config.include_path else None,
        "num_fewshot": config.num_fewshot if config.include_path else None,
        "limit": 4 if config.include_path else None,
        "speed_batch_sizes": "1",
        "speed_lengths": "8",
        "speed_new_tokens": 2,
        "speed_repeats": 1,
        "speed_warmup": 0,
    }
    shared = {**dict(config.shared), "window": 64, "score_windows": 2, "score_window": 32}
    shared |= {k: v for k, v in config.shared if k in given}
    shared["dtype"] = "float32" if "dtype" not in given else dict(config.shared)["dtype"]
    tiny = {name: value for name, value in tiny.items() if name not in given}
    return replace(config, **tiny, shared=tuple(shared.items()))


def _is_of(kind: str, value: Any) -> bool:
    if kind.startswith("tuple"):
        wanted: type = int if "int" in kind else str
        return all(isinstance(v, wanted) and not isinstance(v, bool) for v in value)
    allowed: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    allowed["None"] = type(None)
    parts = [allowed[part] for part in kind.split(" | ")]
    if isinstance(value, bool) and "bool" not in kind:
        return False
    return any(isinstance(value, part) for part in parts)


def _errors_of(check: Any) -> list[str]:
    try:
        check()
    except GhostlayersError as error:
        return [str(error).rstrip(".")]
    return []


def _number_faults(config: CompareConfig) -> list[str]:
    faults = []
    if not config.num_remove and not config.layers:
        faults.append("give `num_remove`, `layers` or both")
    for name, least in (("num_remove", 1), ("num_windows", 1)):
        wrong = [value for value in getattr(config, name) if value < least]
        if wrong:
            faults.append(f"`{name}` has {wrong[0]}; allowed: {least} or more")
    for name, least in (("eval_window", 2), ("eval_windows", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            faults.append(f"`{name}` is {value}; allowed: {least} or more")
    for name in ("include_path", "limit", "num_fewshot"):
        if getattr(config, name) is not None and config.tasks is None:
            faults.append(f"`{name}` needs `tasks`")
    return faults


def _name_faults(config: CompareConfig) -> list[str]:
    faults = []
    for name, allowed in (("recover", operator_names()), ("fit", FITS)):
        for value in getattr(config, name):
            if value not in allowed:
                faults.append(str(unknown_name(name, value, allowed)).rstrip("."))
    for name in ("recover", "fit", "calibration", "num_windows"):
        if not getattr(config, name):
            faults.append(f"`{name}` is empty; give one or more")
    if config.num_remove and not config.select:
        faults.append("`select` is empty; give one or more, or `layers` alone")
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, tuple) and item.name != "shared" and len(set(value)) < len(value):
            twice = next(v for v in value if value.count(v) > 1)
            faults.append(f"`{item.name}` names {twice!r} twice; name each once")
    return faults


def short_names(sources: tuple[str, ...]) -> dict[str, str]:
    """Return a short name for each text: a file's own name where that tells it from the others."""
    names = {source: Path(source).name if Path(source).is_file() else source for source in sources}
    double = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {source: source if name in double else name for source, name in names.items()}


__all__ = [
    "GIVEN_LAYERS",
    "SHARED_FIELDS",
    "VOLATILE_FIELDS",
    "CompareConfig",
    "make_config",
    "short_names",
    "smoke_config",
]
