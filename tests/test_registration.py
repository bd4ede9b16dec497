"""The model type of checkpoints with operators is known whichever way transformers comes in."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import ghostlayers, sys
assert "torch" not in sys.modules
{statement}
from transformers import AutoConfig
assert type(AutoConfig.for_model("ghostlayers")).__module__ == "ghostlayers.modeling_ghostlayers"
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import transformers.models.llama.modeling_llama",  # brings the auto classes in a circle
        "from transformers.quantizers import AutoQuantizationConfig",
        "import transformers",
    ],
)
def test_known_after_any_first_import(statement):
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(statement=statement)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
