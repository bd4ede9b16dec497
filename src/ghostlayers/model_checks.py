"""What is tried out on a model, because no config field says it.

Is it causal, does its cache work, and would a reload give the kept layers the constants they have?
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .decoder import LAYER_INDEX_ATTRIBUTES, base_model, input_device, input_embeddings
from .errors import UnsupportedModelError
from .plan import PruningPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attributes that may differ without changing what a layer computes.
HARMLESS_ATTRIBUTES = frozenset(
    {
        *LAYER_INDEX_ATTRIBUTES,
        "attention_layers",  # gpt_neo: the config's list; the layer reads its own entry at build
        "gradient_checkpointing",
        "num_hidden_layers",  # minimax: only used for initial values
        "seed",  # big_bird: random sparse attention, which a decoder does not use
        "training",
    }
)
CACHE_PARAMETERS = {"cache", "past_key_values", "cache_params", "state"}
LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No gradients and no dropout; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def check_reloadable(model: PreTrainedModel) -> None:
    """Check that the Auto class builds this model's class from its config.

    Raises:
        UnsupportedModelError: If a checkpoint of the model could not be loaded again.
    """
    from transformers import AutoModelForCausalLM

    known = AutoModelForCausalLM._model_mapping
    if type(model.config) not in known:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) is a class that "
            "AutoModelForCausalLM cannot load. Allowed: causal language models of transformers."
        )


def check_attachable(model: PreTrainedModel) -> None:
    """Check that operators can be attached: the classes must be the model type's own.

    Raises:
        UnsupportedModelError: If the model type borrows another type's class, or has no base model
            that the Auto class knows.
    """
    from transformers import AutoModel

    stock: Any = type(model)
    base_known = type(model.config) in AutoModel._model_mapping
    if stock.config_class is not type(model.config) or not base_known:
        lack = "no base model that AutoModel loads" if not base_known else "no class of its own"
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} ({stock.__name__}) has {lack}, so a "
            "checkpoint with operators could not be loaded. Use `recover` none."
        )


def check_causal(model: PreTrainedModel) -> None:
    """Check by a forward pass of a few tokens that no position sees a later one.

    Raises:
        UnsupportedModelError: If changing the last token changes an earlier output: the model is
            an encoder, and removing layers by next-token statistics makes no sense.
    """
    vocabulary = len(input_embeddings(model))
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=input_device(model)) % vocabulary
    with evaluating(model):
        states = base_model(model)(input_ids=ids, use_cache=False)[0][:, :-1].float()
    # States that are not finite are reported by the sweep, with their layer.
    near = 1e-2 if model.dtype in LOW_PRECISION else 1e-3
    if not torch.allclose(states[0], states[1], rtol=near, atol=near, equal_nan=True):
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) attends to later "
            "tokens: it is an encoder. Allowed: decoder-only causal language models."
        )


def check_cache(model: PreTrainedModel, *, what: str = "the model") -> bool:
    """Check that one step with the cache gives what a forward pass without it gives.

    A removal can leave a cache that counts positions wrongly; nothing is raised then, and only the
    text gets worse.

    Returns:
        Whether the logits are finite; if not, there is nothing to compare.

    Raises:
        UnsupportedModelError: If the two disagree, or no cache comes back.
    """
    vocabulary = len(input_embeddings(model))
    prompt = torch.arange(5, 17, device=input_device(model))[None] % vocabulary
    name = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    if not CACHE_PARAMETERS & set(inspect.signature(model.forward).parameters):
        raise UnsupportedModelError(f"{name}: {what} takes no cache to generate with.")
    try:
        out, without = (_two_greedy_steps(model, prompt, use_cache=on) for on in (True, False))
    except (ValueError, IndexError, AttributeError, TypeError, RuntimeError, KeyError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise UnsupportedModelError(
            f"{name}: {what} cannot generate with a cache ({type(error).__name__}: {reason})."
        ) from error
    step, whole = out.logits[-1].float(), without.logits[-1].float()
    if not torch.isfinite(whole).all():
        return False  # reported by the sweep, with its layer
    tolerance = (0.5 if model.dtype in LOW_PRECISION else 0.01) * float(whole.std())
    difference = float((step - whole).abs().max())
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{name}: {what} gives other logits with its cache than without it (by "
            f"{difference:.3g}, logits spread {float(whole.std()):.3g}): text generated from it "
            "would be wrong. Keep other layers, or use another model."
        )
    return True


def _two_greedy_steps(model: PreTrainedModel, prompt: torch.Tensor, *, use_cache: bool) -> Any:
    """Generate two tokens; the second logits come from the cache, or from a whole forward."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(
        pad_token_id=0
    )  # nothing of the model's own mixes in
    try:
        with evaluating(model):
            return model.generate(  # type: ignore[operator]
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=2,
                min_new_tokens=2,
                do_sample=False,
                use_cache=use_cache,
                output_logits=True,
                return_dict_in_generate=True,
            )
    finally:
        model.generation_config = own


def rebuild_without_weights(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Build the model's class from a config; parameters hold no memory.

    Raises:
        UnsupportedModelError: If the class cannot be built from that config.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
            fresh: PreTrainedModel = type(model)(config)
    except Exception as error:  # every family has its own way to refuse a config
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) cannot be built for "
            f"the kept layers ({type(error).__name__}: {reason})."
        ) from error
    return fresh


def compare_with_reload(
    layers: nn.ModuleList, fresh: nn.ModuleList, plan: PruningPlan, model_type: str
) -> None:
    """Compare each kept layer with the layer that a reload would build in its place.

    Args:
        layers: Decoder layers of the dense model.
        fresh: Decoder layers of a model built from the pruned config.
        plan: What is removed.
        model_type: For the message.

    Raises:
        UnsupportedModelError: At the first module, parameter shape or constant that differs, or if
            two layers share a weight.
    """
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if owners.setdefault(id(parameter), index) != index:
                raise UnsupportedModelError(
                    f"model_type {model_type!r}: layers {owners[id(parameter)]} and {index} share "
                    "weights; removing layers would tie others."
                )
    for new_index, old_index in enumerate(plan.kept):
        for difference in _differences(layers[old_index], fresh[new_index]):
            raise UnsupportedModelError(
                f"model_type {model_type!r}: layer {old_index} cannot become layer {new_index}: "
                f"{difference}. Remove other layers (layers behind the last removed one must keep "
                "what depends on their index)."
            )


def _differences(layer: nn.Module, twin: nn.Module) -> list[str]:
    modules, twins = dict(layer.named_modules()), dict(twin.named_modules())
    found = [f"a reload has no module {name!r}" for name in modules if name not in twins]
    found += [f"a reload adds module {name!r}" for name in twins if name not in modules]
    if found:
        return found
    shapes, wanted = (
        {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()}
        for part in (layer, twin)
    )
    for name in sorted(set(shapes) | set(wanted)):
        if shapes.get(name) != wanted.get(name):
            found.append(
                f"tensor {name!r} is {shapes.get(name)}, a reload wants {wanted.get(name)}"
            )
    for path, module in modules.items():
        other, where = twins[path], f"{path}." if path else ""
        if type(module) is not type(other):
            found.append(
                f"{where or 'it'} is a {type(module).__name__}, a reload builds a "
                f"{type(other).__name__}"
            )
        for name, value in vars(module).items():
            if name.startswith("_") or name in HARMLESS_ATTRIBUTES or not _is_plain(value):
                continue
            new_value = getattr(other, name, None)
            if _is_plain(new_value) and not _equal(value, new_value):
                found.append(f"`{where}{name}` is {value!r}, a reload gives {new_value!r}")
        for name in sorted(module._non_persistent_buffers_set):
            one, two = module._buffers.get(name), other._buffers.get(name)
            if one is not None and two is not None and not _close(one, two):
                found.append(f"buffer {where}{name} differs from what a reload computes")
    return found


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape or one.is_meta or two.is_meta:
        return one.shape == two.shape
    return torch.allclose(one.detach().cpu().double(), two.detach().cpu().double(), rtol=1e-2)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_equal, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return one == two or abs(one - two) <= 1e-6 * abs(one) or (one != one and two != two)
    return bool(one == two)


def depth_attributes(
    model: PreTrainedModel, fresh: PreTrainedModel, path: str
) -> list[tuple[nn.Module, str, Any]]:
    """List counts and lists outside the decoder layers that follow the depth.

    Args:
        model: The dense model.
        fresh: A model built from the pruned config.
        path: Path of the layer list within the base model.

    Returns:
        Modules, attribute names and the values that a rebuilt model has.
    """
    inside = f"{path}."
    twins = dict(base_model(fresh).named_modules())
    changes: list[tuple[nn.Module, str, Any]] = []
    for name, module in base_model(model).named_modules():
        if name.startswith(inside) or name not in twins:
            continue
        for attribute, value in vars(module).items():
            counts = isinstance(value, int | list | tuple) and not isinstance(value, bool)
            if attribute.startswith("_") or not counts or not _is_plain(value):
                continue
            new_value = getattr(twins[name], attribute, None)
            if type(new_value) is type(value) and not _equal(value, new_value):
                changes.append((module, attribute, new_value))
    return changes
