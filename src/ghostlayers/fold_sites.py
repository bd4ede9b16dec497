"""Where something can be folded into a decoder layer: its last linear maps, found by probing.

A linear map is an output map of its layer if adding δ to what it returns, or to what an RMSNorm
behind it returns, adds c·δ to what the layer returns, with one constant c, at every position. No
module name is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .decoder import base_model, decoder_layers, input_device, input_embeddings, text_config
from .errors import UnsupportedModelError
from .layer_probe import FoldSite, FoldSites, LayerProbe
from .offload import is_offloaded, loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .plan import Boundary

PROBE_TOKENS = 6


def layer_before(boundary: Boundary) -> int:
    """Return the layer before a cut, as an index of the dense model.

    Raises:
        UnsupportedModelError: If the cut starts at layer 0.
    """
    if boundary.start == 0:
        raise UnsupportedModelError(
            f"boundary {boundary} starts at layer 0: there is no layer before it to fold into. "
            "Keep layer 0, or use `recover` ghost-robust."
        )
    return boundary.start - 1


def find_fold_sites(model: PreTrainedModel, index: int, *, norms: bool = True) -> FoldSites:
    """Find the output maps of a decoder layer.

    One short forward pass captures how the model calls the layer; the layer alone is then called a
    few times on a random hidden state of the usual size.

    Args:
        model: The dense model; it is left as it is.
        index: The decoder layer.
        norms: Whether an RMSNorm may stand behind the MLP output map.

    Returns:
        The maps.

    Raises:
        UnsupportedModelError: If the layer has no MLP output map, with the reason: a gate
            (or a norm) behind it, a mixture of experts, low-bit, offloaded or shared weights.
    """
    layer = decoder_layers(model)[index]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = _probe(model, layer)
    finally:
        model.train(training)
    if isinstance(found, FoldSites) and found.mlp.norm is not None and not norms:
        found = f"a norm ({found.mlp.norm.path!r}) follows {found.mlp.path!r}"
    if isinstance(found, str):
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}), layer {index}: "
            f"{found}. Use `recover` ghost-robust."
        )
    for site in (found.mlp, found.attention):
        if site is not None:
            for path in (site.path, *([site.norm.path] if site.norm else [])):
                _check_weight(model, layer, path, index)
    return found


def _probe(model: PreTrainedModel, layer: nn.Module) -> FoldSites | str:
    """Return the maps, or why there are none."""
    call = _layer_call(model, layer)
    if call is None:
        return "it does not run once on a (batch, positions, channels) state of text"
    try:
        with loaded(layer):
            return LayerProbe(layer, *call).sites()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return f"it cannot be called alone ({type(error).__name__}: {reason})"


def _check_weight(model: PreTrainedModel, layer: nn.Module, path: str, index: int) -> None:
    module = layer.get_submodule(path)
    weight: Any = module.weight
    if weight.is_meta and not is_offloaded(module):
        raise UnsupportedModelError(
            f"layer {index}: the weight of {path!r} is not in memory. Load the "
            "model, or use `recover` ghost-robust."
        )
    owners = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is weight
    ]
    if len(owners) > 1:
        raise UnsupportedModelError(
            f"layer {index}: {path!r} shares its weight ({', '.join(owners)}): a change would "
            "reach the other place as well. Use `recover` ghost-robust."
        )


def _layer_call(
    model: PreTrainedModel, layer: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Capture how the model calls a layer; the state is made random. None: not as expected."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, dict(kwargs)))

    vocabulary = len(input_embeddings(model))
    ids = torch.arange(5, 5 + PROBE_TOKENS, device=input_device(model))[None] % vocabulary
    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        base_model(model)(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    args, kwargs = calls[0] if len(calls) == 1 else ((), {})
    state = args[0] if args else kwargs.get("hidden_states")
    size = text_config(model.config).hidden_size
    if not isinstance(state, torch.Tensor) or state.shape != (1, PROBE_TOKENS, size):
        return None
    generator = torch.Generator().manual_seed(0)
    rms = float(state.float().square().mean(dim=-1).sqrt().median())  # massive tokens are few
    drawn = (rms * torch.randn(state.shape, generator=generator)).to(state)
    if args:
        return (drawn, *args[1:]), kwargs
    return (), {**kwargs, "hidden_states": drawn}


__all__ = ["FoldSite", "FoldSites", "find_fold_sites", "layer_before"]
