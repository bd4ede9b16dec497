"""Models on disk are measured, repaired and written as those in memory, one layer at a time."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from safetensors.torch import load_file

import families
import ghostlayers as gl
from ghostlayers import layerwise_runs, spill
from ghostlayers.decoder import decoder_layers, input_device, share_tensors
from ghostlayers.evaluation import window_losses
from ghostlayers.layerwise import runs_layerwise
from ghostlayers.loading import load_model, locate
from ghostlayers.moments import MomentAccumulator
from ghostlayers.offload import is_offloaded, loaded, stored_tensor
from ghostlayers.placement import Placement
from ghostlayers.plan import Boundary
from ghostlayers.similarity import SimilarityAccumulator
from ghostlayers.suffix import SuffixScorer
from ghostlayers.sweep import batches_of, stream, sweep
from ghostlayers.weight_scores import magnitude_scores, taylor_scores
from oracles import logits, random_ids

FAMILIES = ["llama", "gpt2", "gemma3_text", "qwen3_moe"]
IDS = random_ids(8, 24, seed=7)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A tiny model of a family in memory, and the same checkpoint with every weight on disk."""
    made = {}

    def build(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            families.tiny_model(family).save_pretrained(folder / "m")
            source = locate(str(folder / "m"))
            placement = Placement(
                {"": "disk"},
                offload_folder=str(folder / "offload"),
                spill_folder=str(folder / "spill"),
            )
            offloaded = load_model(source, placement=placement)
            assert runs_layerwise(offloaded)
            made[family] = source, load_model(source, device="cpu"), offloaded, folder
        return made[family]

    return build


@pytest.fixture
def reads(monkeypatch):
    """Count which modules accelerate fetches weights for."""
    counts = Counter()
    plain = AlignDevicesHook.pre_forward

    def counting(hook, module, *args, **kwargs):
        if hook.offload and any(True for _ in module.parameters(recurse=False)):
            counts[module] += 1
        return plain(hook, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", counting)
    return counts


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def close(one, two, tolerance=1e-5):
    """Equal but for the rounding that the place of a matrix in memory decides."""
    torch.testing.assert_close(one, two, rtol=0, atol=tolerance)


def mask_of(ids, padded):
    mask = torch.ones_like(ids)
    for row, count in enumerate(padded):
        mask[row, : ids.shape[1] - count] = 0
    return mask


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_neox", "jamba"])
def test_states_and_losses_are_those_in_memory(pairs, family):
    _, dense, offloaded, _ = pairs(family)
    padded = {"input_ids": IDS[:2], "attention_mask": mask_of(IDS[:2], (24, 10))}
    empty = {"input_ids": IDS[:1], "attention_mask": torch.zeros_like(IDS[:1])}
    batches = [*batches_of(IDS, 3), padded, empty, IDS[:1, :9]]
    wanted = range(len(decoder_layers(dense)) + 1)
    ours, theirs = stream(offloaded, batches, wanted), stream(dense, batches, wanted)
    compared = 0
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one.rows.window, two.rows.window)
        assert torch.equal(one.rows.position, two.rows.position)
        for state in wanted:
            close(one.states[state], two.states[state])
            compared += 1
    assert compared == 5 * len(wanted)
    losses = window_losses(offloaded, IDS, batch_size=3)
    assert losses == pytest.approx(window_losses(dense, IDS, batch_size=3), abs=1e-5)


@pytest.mark.parametrize("recover", ["ghost", "ghost-robust"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_checkpoints_are_equal(pairs, tmp_path, monkeypatch, family, recover):
    # the guard reads written text where no weight is offloaded: without it both decide alike
    monkeypatch.setattr("ghostlayers.guard_text.GuardScorer.written", lambda self: None)
    source, dense, offloaded, folder = pairs(family)
    written = []
    for name, model in (("memory", dense), ("disk", offloaded)):
        result = gl.prune(
            model,
            windows=IDS,
            num_remove=3,
            recover=recover,
            batch_size=3,
            ridge=1e-2,
            progress=False,
        )
        gl.save_pruned(result, tmp_path / name, source=source)
        written.append((result, tensors_of(tmp_path / name)))
    (one, ours), (two, theirs) = written
    assert one.plan == two.plan and len(one.plan.removed) == 3
    assert one.fits.keys() == two.fits.keys()
    assert ours.keys() == theirs.keys()
    assert any(".ghost_" in name for name in ours) == bool(one.fits)
    assert one.fits or recover == "ghost-robust"  # the guard may drop all
    for name, tensor in ours.items():
        close(theirs[name], tensor)
    assert is_offloaded(two.model) and not list((folder / "spill").iterdir())
    close(logits(two.model, IDS), logits(one.model, IDS), 1e-4)
    reloaded = gl.load_pruned(tmp_path / "disk", device="cpu").model
    close(logits(reloaded, IDS), logits(one.model, IDS), 1e-4)


@pytest.mark.parametrize(
    ("family", "recover"),
    [
        ("llama", "fold"),
        ("gemma3_text", "fold"),
        ("gemma3_text", "fold+ghost"),
        ("gpt2", "fold+ghost"),
        ("gpt2", "replaceme-lstsq"),
    ],
)
def test_weights_on_disk_are_changed(pairs, tmp_path, monkeypatch, family, recover):
    monkeypatch.setattr("ghostlayers.recovered.GUARDED", ())  # random models gain too little
    source, dense, offloaded, _ = pairs(family)
    settings = {"layers": "2-3,5", "recover": recover, "windows": IDS, "progress": False}
    if recover.startswith("fold"):
        settings["refine"] = 0  # gradient steps need the weights in memory
    one, two = (gl.prune(model, **settings) for model in (dense, offloaded))
    gl.save_pruned(one, tmp_path / "one", source=source)
    gl.save_pruned(two, tmp_path / "two", source=source)
    ours, theirs = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    before = tensors_of(source.folder)
    assert one.changed == two.changed and one.changed
    for name, tensor in ours.items():
        close(theirs[name], tensor)
    new = [t for t in ours.values() if not any(torch.equal(t, old) for old in before.values())]
    assert len(new) >= sum(name.endswith("weight") for name in one.changed) > 0
    path = next(iter(two.changed))
    assert is_offloaded(offloaded) and offloaded.get_parameter(path).is_meta


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_read_once_per_sweep(pairs, reads, family):
    _, dense, offloaded, _ = pairs(family)
    reads.clear()  # the comparison that finds out whether layers run one by one
    depth = len(decoder_layers(offloaded))
    similarity = SimilarityAccumulator(depth)
    moments = MomentAccumulator([Boundary(2, 5)], num_windows=8, window=24)
    sweep(offloaded, batches_of(IDS, 1), [similarity, moments], progress=False)
    inside = {
        part: i for i, layer in enumerate(decoder_layers(offloaded)) for part in layer.modules()
    }
    found = Counter({inside[part]: reads[part] for part in reads if part in inside})
    assert set(found) == set(range(depth))
    assert {reads[part] for part in reads if part in inside} == {1}
    assert reads[offloaded.get_input_embeddings()] == 1
    reads.clear()
    window_losses(offloaded, IDS, batch_size=1, progress=False)
    counts = dict(reads)
    assert {counts[part] for part in counts if part in inside} == {1}
    assert counts[offloaded.get_output_embeddings()] == 1
    expected = SimilarityAccumulator(depth)
    sweep(dense, batches_of(IDS, 1), [expected], progress=False)
    assert similarity.result().matrix == pytest.approx(expected.result().matrix, abs=1e-6)


def test_a_suffix_runs_layer_by_layer(pairs, reads):
    _, dense, offloaded, _ = pairs("llama")
    plan = gl.PruningPlan(8, (4, 5))
    losses = []
    for model in (dense, offloaded):
        scorer = SuffixScorer(model, IDS, batch_size=2, progress=False)
        pruned = gl.remove_layers_(share_tensors(model), plan.removed)
        scorer.dense_losses([4])
        suffix = scorer.suffix(pruned, plan)
        assert suffix.start == 4
        reads.clear()
        losses.append(scorer.losses(suffix))
    inside = [part for layer in decoder_layers(suffix.model) for part in layer.modules()]
    assert {reads[part] for part in inside if part in reads} == {1}
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_states_are_spilled_and_bounded(pairs, monkeypatch):
    _, _, offloaded, folder = pairs("llama")
    alive, largest = [], 0
    plain = spill.StateStore.get

    def watched(store, name, number):
        nonlocal largest
        assert store.folder == folder / "spill" and not store.tensors
        largest = max(largest, len(list(folder.glob("spill/*/*"))))
        alive.append((name, number))
        return plain(store, name, number)

    monkeypatch.setattr(spill.StateStore, "get", watched)
    for _ in stream(offloaded, batches_of(IDS, 1), (3, 6)):
        pass
    assert {("3", n) for n in range(8)} <= set(alive)
    # per batch: two kept states, the one read, the one written before it is dropped, embeddings
    assert 8 < largest <= 8 * 4 + 1
    assert not list((folder / "spill").iterdir())


def test_batches_go_in_groups_when_the_store_is_small(pairs, reads, monkeypatch):
    _, dense, offloaded, _ = pairs("llama")
    reads.clear()  # the comparison that finds out whether layers run one by one
    one_batch = IDS[:2].numel() * 64 * 4 * (2 + 3)
    monkeypatch.setattr(spill.StateStore, "limit", property(lambda _: 2 * one_batch))
    ours = [seen.states[6].clone() for seen in stream(offloaded, batches_of(IDS, 2), (3, 6))]
    assert {reads[part] for part in decoder_layers(offloaded)[0].modules() if part in reads} == {2}
    theirs = [seen.states[6].clone() for seen in stream(dense, batches_of(IDS, 2), (3, 6))]
    assert len(ours) == 4
    for one, two in zip(ours, theirs, strict=True):
        close(one, two)
    losses = window_losses(offloaded, IDS, batch_size=2, progress=False)
    expected = window_losses(dense, IDS, batch_size=2, progress=False)
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weight_scores(pairs, reads, family):
    _, dense, offloaded, _ = pairs(family)
    layers = [1, 3, 6]
    assert magnitude_scores(offloaded, layers) == magnitude_scores(dense, layers)
    reads.clear()
    ours = taylor_scores(offloaded, IDS, layers, batch_size=3, progress=False)
    inside = {part for layer in decoder_layers(offloaded) for part in layer.modules()}
    assert {reads[part] for part in reads if part in inside} == {1, 2}  # forward, backward
    assert ours == pytest.approx(taylor_scores(dense, IDS, layers, batch_size=3, progress=False))
    assert all(p.is_meta and p.grad is None for p in offloaded.parameters())


def test_loaded_weights_go_again(pairs):
    _, dense, offloaded, _ = pairs("llama")
    layer, twin = decoder_layers(offloaded)[3], decoder_layers(dense)[3]
    path = "mlp.down_proj.weight"
    assert torch.equal(stored_tensor(layer, path), twin.get_parameter(path))
    with loaded(layer):
        assert torch.equal(layer.get_parameter(path), twin.get_parameter(path))
        with loaded(layer):
            pass
        assert not layer.get_parameter(path).is_meta
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert input_device(offloaded) == torch.device("cpu")
    with pytest.raises(ZeroDivisionError), loaded(layer):
        raise ZeroDivisionError
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_layers_that_hand_on_more_run_batch_by_batch(tmp_path):
    model = families.tiny_model("llama")
    model.save_pretrained(tmp_path / "m")
    offloaded = load_model(locate(str(tmp_path / "m")), placement=Placement({"": "disk"}))
    memory: dict[str, torch.Tensor] = {}

    def remember(_module, args):
        memory["state"] = args[0]

    def mix(_module, args):
        return (args[0] + 0.5 * memory["state"], *args[1:])

    for net in (model, offloaded):
        layers = decoder_layers(net)
        layers[1].mlp.register_forward_pre_hook(remember)
        layers[5].mlp.register_forward_pre_hook(mix)
    with pytest.warns(UserWarning, match="depends on more than the hidden state before it"):
        assert not runs_layerwise(offloaded)
    ours = [seen.states[7].clone() for seen in stream(offloaded, batches_of(IDS, 2), [7])]
    theirs = [seen.states[7].clone() for seen in stream(model, batches_of(IDS, 2), [7])]
    for one, two in zip(ours, theirs, strict=True):
        close(one, two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_layerwise(offloaded)  # said once


def test_models_in_memory_run_as_before(monkeypatch):
    def never(*_args, **_keywords):
        raise AssertionError

    monkeypatch.setattr(layerwise_runs, "LayerPass", never)
    model = families.tiny_model("llama")
    assert not runs_layerwise(model)
    assert len(list(stream(model, batches_of(IDS, 4), [1]))) == 2


def test_an_error_leaves_the_model_as_it_was(pairs, monkeypatch):
    """Case 36: a forward pass that fails is an error, and no statistic comes back."""
    _, dense, offloaded, folder = pairs("llama")
    expected = logits(dense, IDS)
    calls = 0

    def fail(_module, _args):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise IndexError("third batch")

    handle = decoder_layers(offloaded)[4].mlp.register_forward_pre_hook(fail)
    with pytest.raises(IndexError, match="third batch"):
        list(stream(offloaded, batches_of(IDS, 2), [8]))
    handle.remove()
    assert not list((folder / "spill").iterdir())
    close(logits(offloaded, IDS), expected, 1e-4)
    assert all(parameter.is_meta for parameter in decoder_layers(offloaded).parameters())
