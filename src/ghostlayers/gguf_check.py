"""Read a GGUF file back before it gets its name: llama.cpp loads no file with layers too many."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import CheckpointError

BLOCK = re.compile(r"blk\.(\d+)\.")


def check_layers(file: Path, num_layers: int, *, dense_layers: int | None = None) -> None:
    """Check that a file describes as many layers as it was made from.

    Args:
        file: GGUF file.
        num_layers: Layers of the checkpoint, linear layers for operators included.
        dense_layers: Depth before layers were removed; a list of that length was left too long.

    Raises:
        CheckpointError: If it cannot be read, holds other layers, or has a list of another depth.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
        count = reader.fields[f"{architecture}.block_count"].contents()
    except (ValueError, KeyError, IndexError) as error:
        raise _wrong(f"it cannot be read ({error})") from error
    found = {int(match[1]) for t in reader.tensors if (match := BLOCK.match(t.name))}
    left_long = count == dense_layers != num_layers
    if left_long or not set(range(num_layers)) <= found <= set(range(count)):
        raise _wrong(
            f"it says {count} layers and holds {len(found)}; the checkpoint has {num_layers}"
        )
    for name, field in reader.fields.items():
        if not name.startswith(f"{architecture}.") or count == dense_layers:
            continue
        value = field.contents()
        if isinstance(value, list) and len(value) == dense_layers:
            raise _wrong(f"{name!r} has {len(value)} entries for {count} layers")


def _wrong(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the GGUF converter wrote a file that llama.cpp cannot load: {reason}. It may not know "
        "this architecture."
    )


__all__ = ["check_layers"]
