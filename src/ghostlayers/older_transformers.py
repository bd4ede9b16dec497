"""Let transformers 4 read what transformers 5 wrote: the same values under the old keys too.

Release 4.57 rotates with the base 10000 where `rope_theta` is missing, without a word, and does not
know the tokenizer class `TokenizersBackend`; the class that it knows gives `token_type_ids` too,
which `generate` refuses, unless the config says what the model takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .modeling_ghostlayers import older_keys

# The name under which both major releases load a tokenizer.json as it is.
TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
# What release 5 gives where nothing is said.
MODEL_INPUTS = ("input_ids", "attention_mask")


def write_older_keys(folder: Path, config: Any, *, name: str = "config.json") -> None:
    """Add the old keys to the config and the tokenizer config of a checkpoint folder.

    Args:
        folder: Holds the config, and `tokenizer_config.json` if there is a tokenizer. What
            transformers 5 reads from them stays the same.
        config: The config that was written.
        name: Its file.
    """
    _update(folder / name, lambda values: _add_to_config(values, config))
    if (folder / "tokenizer_config.json").is_file():
        _update(folder / "tokenizer_config.json", _older_tokenizer)


def _add_to_config(values: dict[str, Any], config: Any) -> None:
    values |= older_keys(config.to_dict(), type(config).from_dict)
    for name in config.sub_configs:
        if isinstance(values.get(name), dict):
            part = getattr(config, name)
            values[name] |= older_keys(part.to_dict(), type(part).from_dict)


def _older_tokenizer(values: dict[str, Any]) -> None:
    name = values.get("tokenizer_class")
    if name in TOKENIZER_CLASSES:
        values["tokenizer_class"] = TOKENIZER_CLASSES[name]
        values.setdefault("model_input_names", list(MODEL_INPUTS))
    if isinstance(values.get("extra_special_tokens"), list):  # 4 wants names for these
        values["additional_special_tokens"] = values.pop("extra_special_tokens")


def _update(path: Path, change: Any) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
