"""Where text comes from: local files, datasets of the Hub, and short names for three of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .errors import CalibrationError

FILE_SUFFIXES = (".txt", ".raw", ".md", ".jsonl", ".parquet")
DOCUMENT_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class HubText:
    """A text column of a dataset on the Hugging Face Hub.

    With a `data_file` it is that file alone, read as a table, and windows are taken from single
    documents: see `document_windows`.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    data_file: str | None = None


PTB, PARQUET = "ptb-text-only/ptb_text_only", "refs/convert/parquet"
C4_VALIDATION = "en/c4-validation.00000-of-00008.json.gz"
SHORT_NAMES: dict[str, tuple[HubText, HubText]] = {
    # name: (for calibration, for evaluation: the splits that LinearPatch scores)
    "c4": (
        HubText("allenai/c4", "en"),
        HubText("allenai/c4", split="validation", data_file=C4_VALIDATION),
    ),
    "wikitext2": (
        HubText("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
        HubText("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    ),
    "ptb": (  # the dataset's own branch is a loading script; the Hub's conversion is not
        HubText(PTB, "penn_treebank", "train", "sentence", PARQUET),
        HubText(PTB, "penn_treebank", "validation", "sentence", PARQUET),
    ),
}


def describe_allowed() -> str:
    """Return what a text source may be, for messages and help."""
    return (
        f"{', '.join(SHORT_NAMES)}, owner/dataset[:config][:split][:column], or a local file "
        f"({', '.join(FILE_SUFFIXES)})"
    )


def check_source(source: str) -> None:
    """Check a source by its name alone, before anything is loaded.

    Raises:
        CalibrationError: If it is no known name, no dataset id, and no existing file.
    """
    parse_source(source)


def parse_source(source: str, *, evaluation: bool = False) -> Path | HubText:
    """Read a text source's name.

    Args:
        source: Short name, dataset id or file path.
        evaluation: Take the evaluation split of a short name instead of its calibration split.

    Returns:
        A file or a dataset column.

    Raises:
        CalibrationError: If it is none of them.
    """
    if source in SHORT_NAMES:
        return SHORT_NAMES[source][evaluation]
    path = Path(source)
    if path.is_file():
        if path.suffix not in FILE_SUFFIXES:
            raise CalibrationError(
                f"text file {source!r} ends in {path.suffix!r}. "
                f"Allowed: {', '.join(FILE_SUFFIXES)}."
            )
        return path
    name, *rest = source.split(":")
    looks_local = path.suffix in FILE_SUFFIXES or source.startswith((".", "/", "~"))
    if looks_local or name.count("/") != 1 or len(rest) > 3 or not all(name.split("/")):
        what = "file does not exist" if looks_local else "is not a known text source"
        raise CalibrationError(f"text source {source!r}: {what}. Allowed: {describe_allowed()}.")
    defaults = ["", "train", "text"]
    config, split, column = [*rest, *defaults[len(rest) :]]
    return HubText(name, config or None, split or "train", column or "text")


def read_text(
    source: str, *, max_characters: int | None = None, evaluation: bool = False
) -> tuple[str, bool, dict[str, Any]]:
    """Read the text of a source, from its start.

    A text file is read as it is; the documents of other sources are joined by a blank line.

    Args:
        source: See `parse_source`.
        max_characters: Stop after the document in which this many characters are reached.
        evaluation: Take the evaluation split of a short name.

    Returns:
        The text, whether it is all there is, and details for the record.

    Raises:
        CalibrationError: If the source is unknown, cannot be reached, or holds no text.
    """
    parsed = parse_source(source, evaluation=evaluation)
    documents: Iterable[str]
    details: dict[str, Any] = {}
    if isinstance(parsed, Path):
        documents = _file_documents(parsed, max_characters)
    else:
        documents, details = _hub_documents(parsed)
    parts: list[str] = []
    characters, complete = 0, True
    for document in documents:
        if max_characters is not None and characters >= max_characters:
            complete = False
            break
        parts.append(document)
        characters += len(document) + len(DOCUMENT_SEPARATOR)
    joined = DOCUMENT_SEPARATOR.join(parts)
    if isinstance(parsed, Path) and parsed.suffix in (".txt", ".raw", ".md"):
        joined = "".join(parts)
    if not joined.strip():
        raise CalibrationError(f"text source {source!r} is empty. Give a source that holds text.")
    return joined, complete, details


def _file_documents(path: Path, max_characters: int | None) -> Iterator[str]:
    if path.suffix == ".jsonl":
        yield from _jsonl_documents(path)
    elif path.suffix == ".parquet":
        yield from _parquet_documents(path)
    else:
        size = max(max_characters or 0, 1 << 26)
        try:
            with path.open(encoding="utf-8", newline="") as file:
                while chunk := file.read(size):
                    yield chunk
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{path} is not UTF-8 text: {error}.") from error


def _jsonl_documents(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise CalibrationError(f"{path}, line {number}: not JSON ({error}).") from error
            text = row if isinstance(row, str) else row.get("text") if hasattr(row, "get") else None
            if not isinstance(text, str):
                raise CalibrationError(
                    f"{path}, line {number}: no string under 'text'. Each line must be a JSON "
                    "string or an object with a 'text' string."
                )
            yield text


def _parquet_documents(path: Path) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CalibrationError(
            f"reading {path} needs pyarrow. Run: pip install 'ghostlayers[data]'."
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are one or the other
        raise CalibrationError(f"{path} is no parquet file ({error}).") from error
    names = file.schema_arrow.names
    if "text" not in names or "string" not in str(file.schema_arrow.field("text").type):
        raise CalibrationError(f"{path} has the columns {names}; a 'text' of strings is needed.")
    for batch in file.iter_batches(columns=["text"], batch_size=1024):
        yield from (text for text in batch.column(0).to_pylist() if text is not None)


def read_table(source: HubText) -> tuple[Any, dict[str, Any]]:
    """Read the one file of a source whose windows come from single documents.

    Returns:
        Rows, each a dictionary, with random access; and details for the record.

    Raises:
        CalibrationError: If it cannot be reached.
    """
    with _hub_errors(source) as datasets:
        rows = _load(datasets, source, streaming=False)
    return rows, {**_details(source, rows), "data_file": source.data_file}


def _hub_documents(source: HubText) -> tuple[Iterable[str], dict[str, Any]]:
    with _hub_errors(source) as datasets:
        stream = _load(datasets, source, streaming=True)
        rows = iter(stream)
        first = next(rows, None)
    if first is not None and not isinstance(first.get(source.column), str):
        raise CalibrationError(
            f"dataset {source.dataset!r} has no text column {source.column!r} "
            f"(columns: {sorted(first)}). Name it: owner/dataset:config:split:column."
        )
    head = [] if first is None else [first]
    return (row[source.column] for row in chain(head, rows)), _details(source, stream)


def _load(datasets: Any, source: HubText, *, streaming: bool) -> Any:
    return datasets.load_dataset(
        source.dataset,
        source.config,
        data_files=None if source.data_file is None else {source.split: source.data_file},
        split=source.split,
        revision=source.revision,
        streaming=streaming,
    )


@contextmanager
def _hub_errors(source: HubText) -> Iterator[Any]:
    """Give the datasets library; any failure to read the source becomes one line."""
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            f"dataset {source.dataset!r} needs the datasets library. Run: "
            "pip install 'ghostlayers[data]', or give a local file."
        ) from error
    try:
        yield datasets
    except Exception as error:  # every network and Hub failure has its own class
        reason = str(error).strip().splitlines()
        raise CalibrationError(
            f"dataset {source.dataset!r} cannot be read ({type(error).__name__}: "
            f"{reason[0] if reason else 'no reason given'}). Check the name and the network, or "
            "give a local .txt, .jsonl or .parquet file."
        ) from error


def _details(source: HubText, rows: Any) -> dict[str, Any]:
    checksums = getattr(getattr(rows, "info", None), "download_checksums", None) or {}
    commits = {url.split("@")[1].split("/")[0] for url in checksums if "@" in url}
    details: dict[str, Any] = {"dataset": source.dataset, "config": source.config}
    details["split"] = source.split
    details["revision"] = commits.pop() if len(commits) == 1 else None
    return details
