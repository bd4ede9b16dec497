"""What `measure_speed` counts, on a clock that only the model's own modules move."""

from __future__ import annotations

import json

import pytest
import torch

import ghostlayers as gl
from ghostlayers import speed
from ghostlayers.decoder import decoder_layers
from ghostlayers.speed_results import _spread, compare_speed
from oracles import tiny_model
from tiny_checkpoints import tiny_tokenizer

SETTINGS = gl.SpeedSettings(batch_sizes=(1, 2), lengths=(8, 12), new_tokens=4, repeats=3, warmup=2)
LAYER, OPERATOR = 10.0, 2.0


class Clock:
    """Stands in for `time`, and counts how often the device was waited for."""

    def __init__(self):
        self.now, self.waits = 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def attach(self, model):
        """A decoder layer takes 10 s, an operator within it 2 s more."""
        for layer in decoder_layers(model):
            layer.register_forward_pre_hook(lambda *_: self.add(LAYER))
        for name, module in model.named_modules():
            if name.endswith(("ghost_input", "ghost_output")):
                module.register_forward_hook(lambda *_: self.add(OPERATOR), always_call=True)
        return model

    def add(self, seconds):
        self.now += seconds

    def wait(self, _device):
        self.waits += 1


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(speed, "time", found)
    monkeypatch.setattr(speed, "_synchronise", found.wait)
    return found


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def pruned(model):
    ids = torch.randint(3, 256, (16, 48), generator=torch.Generator().manual_seed(0))
    return gl.prune(model, tiny_tokenizer(), windows=ids, layers="1-2,4-5", recover="ghost").model


def test_prefill_decode_and_operators_are_told_apart(clock, pruned):
    """Two operators, four layers; the operators' time is a line of its own and part of the rest."""
    result = gl.measure_speed(clock.attach(pruned), SETTINGS)
    assert [(row.batch_size, row.length) for row in result.rows] == [
        (1, 8),
        (1, 12),
        (2, 8),
        (2, 12),
    ]
    for row in result.rows:
        assert row.prefill == (4 * LAYER + 2 * OPERATOR,) * 3
        assert row.decode == (4 * LAYER + 2 * OPERATOR,) * 9  # 4 tokens, 3 runs
        found = row.to_dict()
        assert found["prefill"]["iqr_s"] == 0.0 == found["decode"]["iqr_s"]
        assert found["prefill"]["tokens_per_s"] == pytest.approx(row.batch_size * row.length / 44)
        assert found["decode"]["tokens_per_s"] == pytest.approx(row.batch_size / 44)
    facts = result.to_dict()
    assert (facts["operators"], facts["num_layers"], facts["device"]) == (2, 4, "cpu")
    assert facts["operator_parameters"] == 2 * 64 * 64
    count = sum(parameter.numel() for parameter in pruned.parameters())
    assert (facts["parameters"], facts["parameter_bytes"]) == (count, 4 * count)


def test_operator_time_is_that_of_the_operators_alone(clock, pruned):
    """Their own forward moves the clock; hooks of the measurement enclose it."""
    for name, module in pruned.named_modules():
        if name.endswith(("ghost_input", "ghost_output")):
            forward = module.forward
            module.forward = lambda x, f=forward: (clock.add(OPERATOR), f(x))[1]
    for layer in decoder_layers(pruned):
        layer.register_forward_pre_hook(lambda *_: clock.add(LAYER))
    row = gl.measure_speed(pruned, SETTINGS).rows[0]
    assert row.operator_prefill == (2 * OPERATOR,) * 3
    assert row.operator_decode == (2 * OPERATOR,) * 9
    found = row.to_dict()["operator"]["decode"]
    assert (found["median_s"], found["share"]) == (4.0, pytest.approx(4 / 44))


def test_runs_warmup_and_waiting_for_the_device(clock, model, monkeypatch):
    """CASES 64: k warm-ups, the device waited for at the call and at each token."""
    runs = []
    plain = speed._run

    def counted(*args, **keywords):
        before = clock.waits
        out = plain(*args, **keywords)
        runs.append((args[1].shape, clock.waits - before))
        return out

    monkeypatch.setattr(speed, "_run", counted)
    gl.measure_speed(model, SETTINGS)
    assert runs == [
        (torch.Size(s), 1 + 4) for s in ((1, 8), (1, 12), (2, 8), (2, 12)) for _ in range(5)
    ]


def test_half_the_layers_are_twice_as_fast_on_that_clock(clock, model):
    """CASES 64, with what the removed layers promise beside it."""
    half = gl.prune(model, tiny_tokenizer(), layers="2-5", recover="none", num_windows=2, window=8)
    whole = tiny_model()
    results = [
        gl.measure_speed(clock.attach(each), SETTINGS).to_dict() for each in (whole, half.model)
    ]
    for each in results:
        compare_speed(each, results[0])
    dense, found = results
    assert (dense["promised_speedup"], found["promised_speedup"]) == (1.0, 2.0)
    for row, base in zip(found["rows"], dense["rows"], strict=True):
        assert row["prefill"]["speedup"] == 2.0 == row["decode"]["speedup"]
        assert base["prefill"]["speedup"] == 1.0
        assert row["operator"]["prefill"] == {"median_s": 0.0, "iqr_s": None, "share": 0.0}


def test_spread():
    assert _spread([1.0, 2.0, 3.0, 4.0, 100.0]) == {"median_s": 3.0, "iqr_s": 2.0}
    assert _spread([1.0]) == {"median_s": 1.0, "iqr_s": None}


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "opt"])
def test_any_family_and_nothing_of_it_changes(family):
    model = tiny_model(family)
    model.train()
    own = model.generation_config
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    settings = gl.SpeedSettings((2,), (5,), new_tokens=3, repeats=1, warmup=0)
    found = gl.measure_speed(model, settings).to_dict()
    assert model.training and model.generation_config is own
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    (row,) = found["rows"]
    assert row["prefill"]["median_s"] > 0 < row["decode"]["median_s"]
    assert row["peak_memory_bytes"] > 1e7 and "process" in found["memory"]


def test_an_early_end_token_does_not_end_the_run():
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(256))
    settings = gl.SpeedSettings((1,), (5,), new_tokens=6, repeats=1, warmup=0)
    assert len(gl.measure_speed(model, settings).rows[0].decode) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_sizes": ()}, "`batch_sizes`"),
        ({"lengths": (8, 0)}, "`lengths`"),
        ({"new_tokens": 1}, "`new_tokens` is 1"),
        ({"repeats": 0}, "`repeats` is 0"),
        ({"warmup": -1}, "`warmup` is -1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(gl.GhostlayersError, match=message):
        gl.SpeedSettings(**settings)


def test_a_prompt_that_does_not_fit(model):
    with pytest.raises(gl.GhostlayersError, match="allows 512"):
        gl.measure_speed(model, gl.SpeedSettings((1,), (500,), new_tokens=13))


# The command line.

FLAGS = ["--speed-batch-sizes", "1,2", "--speed-lengths", "8", "--speed-new-tokens", "3"]
FLAGS += ["--speed-repeats", "2", "--speed-warmup", "1"]


def test_eval_speed(work, run, tmp_path):
    flags = ["--calibration", work / "t.txt", "--num-windows", 8, "--window", 32]
    flags += ["--layers", "2-5", "--recover", "ghost"]
    assert run("prune", work / "m", "-o", tmp_path / "p", *flags)[0] == 0
    flags = ["--speed", *FLAGS, "--json", tmp_path / "e.json"]
    status, out, err = run("eval", work / "m", tmp_path / "p", *flags)
    assert (status, err) == (0, "")
    dense, pruned = json.loads((tmp_path / "e.json").read_text())["results"]
    assert "perplexity" not in dense and dense["speed"]["operators"] == 0
    assert pruned["speed"]["promised_speedup"] == 2.0 and pruned["speed"]["operators"] == 1
    assert [row["batch_size"] for row in pruned["speed"]["rows"]] == [1, 2]
    assert len(out.splitlines()) == 2 + 2 * 3 + 1 + 2  # head; rows, one for the operator; notes
    assert "operators alone" in out and "4 layers" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speed-batch-sizes", "1,x"], "'1,x'"),
        (["--speed-lengths", "600"], "allows 512"),
        (["--speed-repeats", "0"], "`repeats` is 0"),
    ],
)
def test_wrong_flags(work, refuse, tmp_path, flags, message):
    assert message in refuse(tmp_path, "eval", work / "m", "--speed", *flags)
