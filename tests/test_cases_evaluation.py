"""CASES section F: perplexity, tasks and speed, where users got numbers that mean nothing.

Entry 58 and the smallest inputs of 59 and 61 are here. The others: 59, 60 and 62 in `test_tasks`,
61 in `test_protocol` and `test_eval_texts`, 64 in `test_speed`.
"""

from __future__ import annotations

import pytest

import ghostlayers as gl
from conftest import packaged_gguf
from ghostlayers.calibration import adds_bos
from ghostlayers.loading import load_model, load_tokenizer, locate
from oracles import reload, tiny_model
from tiny_checkpoints import text_of, tiny_tokenizer


@pytest.fixture
def text(tmp_path):
    (tmp_path / "t.txt").write_text(text_of(800))
    return str(tmp_path / "t.txt")


class TestBos:
    """Entry 58 (and 40): BOS in front of every window, from the ids, in calibration as well."""

    @pytest.mark.parametrize("flag", [False, True])
    @pytest.mark.parametrize("template", [False, True])
    def test_the_template_decides_not_the_flag(self, text, template, flag):
        tokenizer = tiny_tokenizer(template)
        tokenizer._add_bos_token = flag  # the setter would change the template as well
        assert tokenizer.add_bos_token is flag
        assert adds_bos(tokenizer) is template
        for evaluation in (False, True):
            windows = gl.text_windows(
                tokenizer, text, num_windows=6, window=16, evaluation=evaluation
            )
            assert windows.bos_per_window is template
            assert (windows.ids[:, 0] == 1).tolist() == [template] * 6
            assert not (windows.ids[:, 1:] == 1).any()

    def test_the_harness_follows_the_same_rule(self):
        pytest.importorskip("lm_eval", reason="the extra eval is not installed")
        from ghostlayers.harness_model import HarnessModel

        for template in (False, True):
            tokenizer = tiny_tokenizer(template)
            tokenizer._add_bos_token = not template
            harness = HarnessModel(tiny_model(), tokenizer, batch_size=1)
            plain = tiny_tokenizer()("abc", add_special_tokens=False).input_ids
            assert harness.tok_encode("abc") == [1] * template + plain

    @pytest.mark.slow
    @pytest.mark.real_model
    def test_gemma_needs_it(self, shared):
        """2048 tokens of plain English in windows of 256: many times worse without BOS."""
        source = locate(str(packaged_gguf("gemma3")))
        model, tokenizer = load_model(source), load_tokenizer(source)
        path = str(shared / "data" / "corpora" / "wiki.test.raw")
        windows = gl.text_windows(tokenizer, path, num_windows=8, window=256)
        assert windows.bos_per_window
        assert (windows.ids[:, 0] == tokenizer.bos_token_id).all()
        plain = windows.ids[:, 1:]  # the same tokens are scored, but one per window
        found = gl.perplexity(model, windows, progress=False).perplexity
        without = gl.perplexity(model, plain, progress=False).perplexity
        assert found < 30 and without > 2 * found


class TestObjects:
    """Entry 59: the object in memory, built from a config alone, with no name to look up."""

    def test_a_model_from_a_config_has_its_own_length(self, tmp_path):
        pytest.importorskip("lm_eval", reason="the extra eval is not installed")
        from ghostlayers.harness_model import HarnessModel

        model = tiny_model()
        assert not model.config.name_or_path
        harness = HarnessModel(model, tiny_tokenizer(), batch_size=1)
        assert harness.max_length == 512 == model.config.max_position_embeddings

    def test_perplexity_of_the_object_is_that_of_its_checkpoint(self, text, tmp_path):
        windows = gl.text_windows(tiny_tokenizer(), text, num_windows=8, window=32)
        for recover in ("ghost", "linearpatch-diag", "replaceme-lstsq"):
            result = gl.prune(tiny_model(), layers="3-4", recover=recover, windows=windows)
            gl.save_pruned(result, tmp_path / recover)
            loaded = reload(tmp_path / recover)
            memory, disk = (
                gl.perplexity(each, windows, progress=False).window_losses
                for each in (result.model, loaded)
            )
            assert memory == pytest.approx(disk, abs=1e-6)


class TestProtocol:
    """Entry 61: what a perplexity was measured on is in its record."""

    def test_two_windows_are_two_records(self, text):
        model = tiny_model().bfloat16()
        for window in (32, 128):
            windows = gl.text_windows(tiny_tokenizer(True), text, num_windows=3, window=window)
            record = gl.perplexity(model, windows, progress=False).to_dict()
            wanted = {"window": window, "stride": window, "windows": 3, "dtype": "bfloat16"}
            wanted |= {"bos_per_window": True, "tokens": 3 * (window - 1), "source": text}
            assert {key: record[key] for key in wanted} == wanted
            assert record["ids_sha256"] == windows.ids_sha256
