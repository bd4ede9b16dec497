"""Put operators y = x + RMSNorm(x) M into a GGUF file, as layers that llama.cpp runs already.

llama.cpp's graph of the architecture `deci` (Nemotron-NAS) is that of `llama`, but a layer with
heads and without key-value heads replaces attention by one linear map: x + Wo·RMSNorm(x). Its feed
forward network cannot be left out, since then the graph goes on from x, so it gets one whose
output map is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

SOURCE_ARCHITECTURE = "llama"
ARCHITECTURE = "deci"
# Width of the feed forward network that adds zero: one block of the quantized types.
ZERO_WIDTH = 32


def graft_operators(
    source: Path, out: Path, operators: Mapping[int, np.ndarray], *, norm_eps: float
) -> None:
    """Write a GGUF file with linear layers between the decoder layers of another one.

    Args:
        source: GGUF file of the architecture `llama`, dense feed forward networks only.
        out: File to write.
        operators: By position, (C, C) float32 in the layout of `nn.Linear`: before decoder layer i,
            or behind the last one for i = L.
        norm_eps: What the operators' norm adds to the mean square; the file has one for all norms.

    Raises:
        UnsupportedModelError: If the file's graph is another one, or its norms add another number.
    """
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(source)
    _check_graph(reader, norm_eps)
    depth = int(_value(reader, "block_count"))
    order = [
        entry
        for layer in range(depth + 1)
        for entry in ([("operator", layer)] if layer in operators else []) + [("layer", layer)]
    ][:-1]
    writer = GGUFWriter(out, ARCHITECTURE)
    _copy_metadata(reader, writer, order)
    _copy_tensors(reader, writer, order)
    for index, (kind, layer) in enumerate(order):
        if kind == "operator":
            _add_operator(writer, index, operators[layer], _matrix_type(reader))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(f"{SOURCE_ARCHITECTURE}.{key}")
    return default if field is None else field.contents()


def _check_graph(reader: GGUFReader, norm_eps: float) -> None:
    field = reader.get_field("general.architecture")
    found = None if field is None else field.contents()
    if found != SOURCE_ARCHITECTURE:
        raise UnsupportedModelError(
            f"the model is of llama.cpp's architecture {found!r}, which has no linear layers "
            f"({SOURCE_ARCHITECTURE!r} has a twin with them). Prune with --recover fold or none."
        )
    if _value(reader, "expert_count", 0):
        raise UnsupportedModelError(
            "the model is a mixture of experts, for which llama.cpp has no linear layers. Prune "
            "with --recover none."
        )
    stored = float(_value(reader, "attention.layer_norm_rms_epsilon"))
    if abs(stored - norm_eps) > 1e-6 * norm_eps:
        raise UnsupportedModelError(
            f"the operators' norm adds {norm_eps:g} to the mean square, the model's norms add "
            f"{stored:g}; a GGUF file holds one number. Prune again with --recover ghost-norm."
        )


def _per_layer(value: Any, order: list[tuple[str, int]], operator: int) -> list[int]:
    """Return one number per layer of the new file."""
    own = value if isinstance(value, list) else [value] * len(order)
    return [int(own[layer]) if kind == "layer" else operator for kind, layer in order]


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, order: list[tuple[str, int]]) -> None:
    from gguf import GGUFValueType

    heads = _value(reader, "attention.head_count")
    changed: dict[str, Any] = {
        "block_count": len(order),
        "attention.head_count": _per_layer(heads, order, max(np.atleast_1d(heads))),
        "attention.head_count_kv": _per_layer(
            _value(reader, "attention.head_count_kv", heads), order, 0
        ),
        "feed_forward_length": _per_layer(_value(reader, "feed_forward_length"), order, ZERO_WIDTH),
    }
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        key = name.removeprefix(f"{SOURCE_ARCHITECTURE}.")
        if key != name and key in changed:
            continue
        kind, *inner = field.types
        new = name if key == name else f"{ARCHITECTURE}.{key}"
        writer.add_key_value(new, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for key, value in changed.items():
        if isinstance(value, list):
            writer.add_key_value(
                f"{ARCHITECTURE}.{key}", value, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT32
            )
        else:
            writer.add_key_value(f"{ARCHITECTURE}.{key}", value, GGUFValueType.UINT32)


def _copy_tensors(reader: GGUFReader, writer: GGUFWriter, order: list[tuple[str, int]]) -> None:
    places = {layer: index for index, (kind, layer) in enumerate(order) if kind == "layer"}
    for tensor in reader.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            name = f"blk.{places[int(layer)]}.{rest}"
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)


def _matrix_type(reader: GGUFReader) -> Any:
    """Return the type in which the file keeps its attention maps."""
    return next(t.tensor_type for t in reader.tensors if t.name.endswith("attn_q.weight"))


def _add_operator(writer: GGUFWriter, index: int, weight: np.ndarray, kind: Any) -> None:
    from gguf import quants

    size = len(weight)
    matrices = {
        "attn_output": weight,
        "ffn_gate": np.zeros((ZERO_WIDTH, size), np.float32),
        "ffn_up": np.zeros((ZERO_WIDTH, size), np.float32),
        "ffn_down": np.zeros((size, ZERO_WIDTH), np.float32),
    }
    for name, matrix in matrices.items():
        data = quants.quantize(np.ascontiguousarray(matrix, np.float32), kind)
        writer.add_tensor(f"blk.{index}.{name}.weight", data, raw_dtype=kind)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{index}.{name}.weight", np.ones(size, np.float32))
