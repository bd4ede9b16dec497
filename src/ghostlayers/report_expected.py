"""Numbers that a configuration expects, beside the cells that were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .compare_growth import AXES
from .compare_lines import RunLine
from .compare_results import CompareResults
from .expected_numbers import ExpectedNumber, expected_numbers
from .report_data import Value, short_name
from .report_measured import Found, measurements
from .report_parts import Expectation
from .report_style import with_error

NOT_RUN = "not run"
NOT_COMPARED = "not compared"
HEADER = ("model", "method", "removed", "what", "expected", "source", "measured", "difference")
HEADER_END = ("percent", "calibration")
UNITS = {
    "accuracy": "accuracy",
    "perplexity": "perplexity",
    "rls": "RLS",
    "speedup": "speed-up, ×",
    "less_peak_memory": "less peak memory, %",
}
PLACES = {"rls": 3}
# Like AXES: where cells run and what is kept, not what they measure.
MACHINE = ("device", "moments_device", "moments_memory", "states_memory", "batch_size")
OTHER = ("perplexity", "speed", "save_checkpoints")
SCORED = {
    "perplexity": ("eval_window", "eval_windows"),
    "accuracy": ("tasks", "include_path", "limit", "num_fewshot"),
    "speedup": ("speed_batch_sizes", "speed_lengths", "speed_new_tokens", "speed_repeats"),
}
TOLD = ("dtype", "seed")  # said, and still compared


def expectation(results: CompareResults) -> Expectation:
    """Put the expected numbers of a comparison beside its cells.

    Args:
        results: The comparison, checked, with a `run` line that expects something.

    Returns:
        A row for each number and each cell it is about; one that says "not run" without any.
    """
    run = results.run
    assert run is not None  # checked where it was read
    numbers = expected_numbers(run.expected)
    rest, source = run.expected, ""
    if isinstance(rest, Mapping) and numbers:
        source = str(rest.get("source") or "")
        rest = {key: value for key, value in rest.items() if key not in ("source", "numbers")}
    notes = list(_run_notes(run, numbers))
    own = [number for number in numbers if _same_model(run, number)]
    others = len(numbers) - len(own)
    if own and others:
        notes.append(
            f"{others} more numbers are about other models; they belong to their own runs of the "
            "configuration."
        )
    rows, reasons = [], dict[str, None]()
    for number in own or numbers:
        every: list[Found | None] = [*measurements(results, number)] if own else []
        rows += [_row(number, found, run, source, reasons) for found in every or [None]]
    notes += [f"{NOT_COMPARED.capitalize()}: {reason}." for reason in reasons]
    remarks = Counter(number.note for number in own or numbers if number.note)
    notes += [f"Of {count} of the numbers: {note}." for note, count in remarks.items()]
    return Expectation(run.title or "", notes, (*HEADER, *HEADER_END), rows, rest or None)


def _same_model(run: RunLine, number: ExpectedNumber) -> bool:
    """Whether a run is of the number's model; a local copy is known by the end of its path."""
    name, wanted = str(run.model["name"]), number.model or str(run.model["name"])
    return name == wanted or name.rsplit("/", 1)[-1].lower() == wanted.rsplit("/", 1)[-1].lower()


def _run_notes(run: RunLine, numbers: Sequence[ExpectedNumber]) -> Iterator[str]:
    if not numbers:
        return
    if not any(_same_model(run, number) for number in numbers):
        wanted = ", ".join(dict.fromkeys(str(number.model) for number in numbers))
        yield (
            f"This grid was run on {short_name(str(run.model['name']))}, not on {wanted}: nothing "
            "below was measured, and its cells are no test of these numbers."
        )
    planned = run.planned
    if planned is None:
        yield "The comparison does not record what its configuration asked for."
    elif planned.get("smoke"):
        yield (
            "This grid was run at smoke size (a few short windows of local text): it tests the "
            "program, not the numbers, and no difference is given."
        )
    else:
        told = [text for name in TOLD if (text := _deviation(run, name))]
        if told:
            yield f"Other settings than the configuration's: {'; '.join(told)}."


def _deviation(run: RunLine, name: str) -> str:
    """Say how a setting differs from the configuration's; empty if it does not."""
    planned = (run.planned or {}).get("settings", {}).get(name)
    given = run.settings.get(name)
    return "" if planned == given else f"{name} is {given}, the configuration says {planned}"


def _why_not(run: RunLine, number: ExpectedNumber, found: Found) -> str:
    """Say why there is no difference; empty if there is."""
    if number.differs or found.reason:
        return number.differs or found.reason
    if run.planned is None:
        return "what the configuration asked for is not recorded"
    if run.planned.get("smoke"):
        return "smoke size"
    scored = {name for names in SCORED.values() for name in names}
    ignored = {*AXES, *MACHINE, *OTHER, *TOLD, *scored} - set(SCORED.get(number.quantity, ()))
    settings = run.planned.get("settings", {})
    wrong = [text for name in settings if name not in ignored and (text := _deviation(run, name))]
    if found.calibration is not None:
        counts = settings.get("num_windows") or []
        axes = ("calibration", run.planned["calibrations"]), ("num_windows", counts)
        for (axis, planned), value in zip(axes, found.calibration, strict=True):
            if value not in planned:
                listed = ", ".join(map(str, planned))
                wrong.append(f"{axis} is {value}, the configuration says {listed}")
    return "; ".join(wrong)


def _row(
    number: ExpectedNumber,
    found: Found | None,
    run: RunLine,
    source: str,
    reasons: dict[str, None],
) -> list[str]:
    places = PLACES.get(number.quantity, 2)
    measured, difference, percent, calibration = NOT_RUN, "–", "–", "–"
    if found is not None:
        measured = _measured(found, places)
        if found.value is not None:
            reason = _why_not(run, number, found)
            reasons |= {reason: None} if reason else {}
            difference, percent = _difference(number, found, places, reason)
        if found.calibration is not None:
            calibration = f"{found.calibration[0]}, {found.calibration[1]} windows"
    selector = number.select or (found.selector if found else "") or "any selector"
    method = "dense" if number.num_remove is None else f"{selector} + {number.recover}"
    what = UNITS[number.quantity]
    if number.quantity == "accuracy":
        what = f"mean {number.metric}, %"
    elif number.quantity == "perplexity":
        what = f"{what}, {number.text}" if number.text else f"mean {what}"
    return [
        short_name(number.model or str(run.model["name"])),
        method,
        "0" if number.num_remove is None else str(number.num_remove),
        what,
        ("≥ " if number.at_least else "") + f"{number.value:.{places}f}",
        source or "–",
        measured,
        difference,
        percent,
        calibration,
    ]


def _measured(found: Found, places: int) -> str:
    if found.value is None:
        return found.reason or NOT_RUN
    if found.high is not None and found.high != found.value:
        return f"{found.value:.{places}f} to {found.high:.{places}f}"
    return with_error(Value(found.value, found.error), places=places)


def _difference(number: ExpectedNumber, found: Found, places: int, reason: str) -> tuple[str, str]:
    if reason or found.value is None:
        return NOT_COMPARED, "–"
    if found.high is not None and found.high != found.value:
        return NOT_COMPARED, "–"  # no single number
    if number.at_least and found.value >= number.value:
        return "as expected", "–"
    change = found.value - number.value
    with_share = number.quantity == "perplexity" and number.value != 0
    share = f"{100 * change / number.value:+.1f}" if with_share else "–"
    return f"{change:+.{places}f}", share


__all__ = ["expectation"]
