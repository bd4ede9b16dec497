"""Tiny saved checkpoints with a fast tokenizer, and texts to measure them on."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from oracles import tiny_model

WORDS = ["the", "layer", "of", "a", "model", "that", "was", "removed", "by", "map", "and", "small"]


def tiny_tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: 3 special tokens, then one token a byte (253 of them)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:253]
    specials = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save_tiny(folder: Path, family: str = "llama", *, adds_bos: bool = False, **changes) -> Path:
    """Save a tiny model and its tokenizer; `max_shard_size` goes to `save_pretrained`."""
    shards = {key: changes.pop(key) for key in ("max_shard_size",) if key in changes}
    tiny_model(family, **changes).save_pretrained(folder, **shards)
    tiny_tokenizer(adds_bos).save_pretrained(folder)
    return folder


def text_of(num_words: int = 400, seed: int = 0) -> str:
    """Write words in a fixed random order."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


def listing(folder: Path) -> dict[str, bytes | None]:
    """Read a folder: every path below it with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
