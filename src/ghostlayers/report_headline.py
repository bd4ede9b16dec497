"""The result in plain words: what a reader sees first."""

from __future__ import annotations

from dataclasses import dataclass

from .operators import REFINED
from .report_data import Model, Study, Value, short_name
from .report_style import Table, number, with_error


@dataclass(frozen=True)
class Card:
    """A number that stands on its own: what it is, before, after, and what that means."""

    term: str
    before: str
    after: str
    note: str


def title_of(study: Study) -> str:
    """Return the result in one line, such as '7 of 30 layers removed: perplexity 29.8 → 49.0'."""
    model, depth = study.headline, study.num_layers
    if model is None or not model.num_removed:
        if study.budgets:
            return f"{study.budgets[-1]} of {depth} layers removed"
        if study.scores and study.scores[0].rls is not None:
            return f"{depth} layers, RLS {study.scores[0].rls:.2f}"
        return "What was measured"
    gone = f"{model.num_removed} of {depth} layers removed"
    if study.texts and study.texts[0] in model.perplexity:
        after = number(model.perplexity[study.texts[0]].value, 3)
        before = _dense(study, study.texts[0])
        start = f"{number(before.value, 3)} → " if before else ""
        return f"{gone}: perplexity {start}{after}"
    if "acc" in model.accuracy:
        before = study.dense.accuracy.get("acc") if study.dense else None
        start = f"{100 * before.value:.1f} → " if before else ""
        return f"{gone}: accuracy {start}{100 * model.accuracy['acc'].value:.1f} %"
    return gone


def sentence_of(study: Study) -> str:
    """Say what was done and what it costs and gives."""
    model, depth = study.headline, study.num_layers
    if model is None or not model.num_removed or depth is None:
        return ""
    parts = [f"{model.method} on {short_name(study.model)}"]
    parts.append(_training(model))
    lines = [", ".join(parts) + f": {100 * model.num_removed / depth:.0f} % fewer layers."]
    bare = None
    if model.selector and study.texts and study.texts[0] in model.perplexity:
        bare = _without_repair(study, model)
        if bare is not None:
            lines.append(
                f"The same cut without repair: {number(bare.perplexity[study.texts[0]].value, 3)}."
            )
    rivals = [m for m in study.of_budget(model.num_removed) if m.perplexity or m.accuracy]
    if len(rivals) > (1 if bare is None else 2):
        lines.append(
            f"It is the best of {len(rivals)} methods at this number of layers, picked on the text "
            "it is scored on."
        )
    return " ".join(lines)


def _training(model: Model) -> str:
    if model.trained:
        return "then trained"
    if any(name.endswith(REFINED) for name in model.used):
        return "the repair alone refined by gradient steps"
    return "without training"


def _dense(study: Study, text: str) -> Value | None:
    return None if study.dense is None else study.dense.perplexity.get(text)


def _without_repair(study: Study, model: Model) -> Model | None:
    text = study.texts[0]
    for other in study.main_models:
        if other.operator == "none" and other.removed == model.removed and text in other.perplexity:
            return other if other is not model else None
    return None


def cards_of(study: Study) -> list[Card]:
    """Return the numbers of the headline's model."""
    model, depth = study.headline, study.num_layers
    if model is None or not model.num_removed or depth is None:
        return []
    left = depth - model.num_removed
    cards = [Card("layers", str(depth), str(left), f"{model.layers} removed")]
    for text in study.texts[:2]:
        if text in model.perplexity:
            after, before = model.perplexity[text], _dense(study, text)
            note = f"on {text}"
            if before is not None:
                note += f", {after.value / before.value:.2f}×"
            start = number(before.value, 3) if before else ""
            cards.append(Card("perplexity", start, number(after.value, 3), note))
    if "acc" in model.accuracy:
        own = study.dense.accuracy.get("acc") if study.dense else None
        start = f"{100 * own.value:.1f}" if own else ""
        note = f"percent, ± {with_error(model.accuracy['acc'], 100, 1).split('± ')[-1]}"
        cards.append(Card("accuracy", start, f"{100 * model.accuracy['acc'].value:.1f}", note))
    rows = (model.speed or {}).get("rows") or []
    if rows and rows[0]["decode"].get("speedup") is not None:
        row = rows[0]
        note = f"measured, batch {row['batch_size']}, prompt {row['length']}"
        cards.append(Card("decoding speed", "1×", f"{row['decode']['speedup']:.2f}×", note))
    return cards


def best_table(study: Study) -> Table | None:
    """Return the best model of each number of removed layers; None if there is only one."""
    header = ["removed", "method", "layers"]
    header += [f"perplexity, {text}" for text in study.texts]
    with_accuracy = any("acc" in model.accuracy for model in study.models)
    with_speed = any(model.speed for model in study.models)
    header += ["accuracy, %"] if with_accuracy else []
    header += ["decoding speed"] if with_speed else []
    rows = []
    for budget in study.budgets:
        model = study.best(study.of_budget(budget))
        if model is not None:
            row = [str(budget), model.method, model.layers]
            row += [with_error(model.perplexity.get(text)) for text in study.texts]
            row += [with_error(model.accuracy.get("acc"), 100, 1)] if with_accuracy else []
            if with_speed:
                parts = (model.speed or {}).get("rows") or [{}]
                speedup = (parts[0].get("decode") or {}).get("speedup")
                row.append("–" if speedup is None else f"{speedup:.2f}×")
            rows.append(row)
    return (
        Table(header, rows, "Lowest perplexity, else highest accuracy") if len(rows) > 1 else None
    )


__all__ = ["Card", "best_table", "cards_of", "sentence_of", "title_of"]
