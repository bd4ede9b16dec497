"""A cross-section of the architecture table; the whole table is checked by `make architectures`."""

from __future__ import annotations

import pytest
import transformers

from conftest import needs_transformers

architectures = pytest.importorskip("architectures", exc_type=ImportError)
pytestmark = needs_transformers("5.24", "families.py builds the model types of this release")

TABLE = architectures.statuses(architectures.TABLE.read_text(encoding="utf-8"))
SETS = {name: architectures.REMOVALS[name] for name in ("first", "scattered")}
# One of each kind: tuple outputs, learned positions, fused experts, sliding windows, state space,
# hybrid, constants by index, a layer of its own kind, nested config, shared weights, no cache.
CROSS_SECTION = (
    "bamba",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "diffllama",
    "falcon_h1",
    "gemma3",
    "gpt_neo",
    "gpt_oss",
    "mamba2",
    "minimax",
    "modernbert-decoder",
    "mpt",
    "openai-gpt",
    "phi3",
    "qwen3_next",
    "smollm3",
    "zamba2",
)


@pytest.mark.parametrize("model_type", CROSS_SECTION)
def test_class(model_type):
    verdict = architectures.judge(model_type, SETS)
    assert not verdict.failures
    if TABLE[model_type] == "ok":
        assert verdict.status == "ok"
    if TABLE[model_type] == "refused":
        assert verdict.status == "refused"
    assert all(len(reason) > 40 and model_type in reason for reason in verdict.refused.values())


def test_table_covers_every_class_of_the_mapping_and_enough_are_ok():
    if transformers.__version__ in architectures.TABLE.read_text(encoding="utf-8"):
        assert set(TABLE) == set(architectures.MODEL_TYPES)
    assert sum(status == "ok" for status in TABLE.values()) >= 60
    assert "FAILED" not in TABLE.values()
