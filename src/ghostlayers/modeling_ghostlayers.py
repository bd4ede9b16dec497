"""Hugging Face models that carry operators at the places of removed decoder layers.

A module of the package and, unchanged, the file in every checkpoint with operators, so it imports
torch and transformers only. An operator y = x + x M is part of a decoder layer: first thing in it,
or last where the removed run ended the model. `GhostLlamaConfig` and so on are made on demand.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPE = "ghostlayers"
# A key of id2label, which every stock config class turns into an int: so each of them raises, where
# LlamaForCausalLM.from_pretrained would warn about the model_type and run without the operators.
SENTINEL = "ghostlayers checkpoint: load with trust_remote_code=True or after `import ghostlayers`"
_OPTIONAL: dict[str, Any] = {"rank": None, "bias": False, "sink_threshold": None}
_OPTIONAL |= {"sink_cosine": None, "norm_eps": None}
_CLASSES: dict[type, Any] = {}
Specs = Sequence[Mapping[str, Any]]


def _check_specs(specs: Specs, depth: int, hidden_size: int) -> list[dict[str, Any]]:
    """Returns the operator specs with every key present, or raises a one-line ValueError."""
    checked, places = [{**_OPTIONAL, **spec} for spec in specs], set()
    for spec in checked:
        if wrong := {"layer", "side", *_OPTIONAL} ^ set(spec):
            raise ValueError(f"operators: unknown or missing keys {sorted(wrong)} in {spec}")
        layer, rank, sink = spec["layer"], spec["rank"], spec["sink_threshold"]
        cosine, eps = spec["sink_cosine"], spec["norm_eps"]
        is_sink = sink is None or type(sink) in (int, float) and 0 < sink < math.inf
        is_eps = eps is None or type(eps) in (int, float) and 0 < eps < math.inf
        is_cosine = cosine is None or type(cosine) in (int, float) and -1 < cosine < 1
        is_rank = rank is None or type(rank) is int and 0 < rank <= hidden_size
        for key, valid, allowed in (
            ("layer", type(layer) is int and 0 <= layer < depth, f"0 to {depth - 1}"),
            ("side", spec["side"] in ("input", "output"), "'input' or 'output'"),
            ("rank", is_rank, f"None or 1 to {hidden_size}"),
            ("bias", isinstance(spec["bias"], bool), "True or False"),
            ("sink_threshold", is_sink, "None or a positive finite number"),
            ("sink_cosine", is_cosine, "None or a number between -1 and 1"),
            ("norm_eps", is_eps, "None or a positive finite number"),
            ("sink_cosine", sink is None or cosine is None, "None beside sink_threshold"),
        ):
            if not valid:
                raise ValueError(f"operators: {key} must be {allowed}, got {spec[key]!r}")
        places.add((layer, spec["side"]))
    if len(places) < max(1, len(checked)):
        raise ValueError(f"operators: at least one, and one per layer and side, got {checked}")
    return checked


class GhostOperator(nn.Module):
    """The map y = x + x M that stands in for a removed run of layers; zero parameters: y = x.

    C is the hidden size, r the rank. Parameters are `map.weight` (C, C), or `down.weight` (r, C)
    and `up.weight` (C, r); `bias` (C,) is added; tokens whose L2 norm exceeds `sink_threshold`, or
    whose x / |x| times `sink_direction` (C,) exceeds `sink_cosine`, get y = x + `shift` (C,). Maps
    are plain linears, which serving engines replace by their own. With `norm_eps` the map reads
    RMSNorm(x) = x / sqrt(mean(x²) + norm_eps): y = x + RMSNorm(x) M.

    Args:
        hidden_size: C.
        spec: an entry of `config.ghost_operators`; all but `layer` and `side` are read.
        like: device and dtype of the parameters; keywords of torch.zeros.
    """

    def __init__(self, hidden_size: int, spec: Mapping[str, Any], **like: Any) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            module = nn.Linear(inputs, outputs, bias=False, device="meta")  # draws no random number
            module.weight = nn.Parameter(torch.zeros(outputs, inputs, **like))
            module._ghost_part = True  # type: ignore[assignment]  # for _init_weights
            return module

        self.rank, self.sink_threshold = spec.get("rank"), spec.get("sink_threshold")
        self.sink_cosine, self.norm_eps = spec.get("sink_cosine"), spec.get("norm_eps")
        if self.rank is None:
            self.map = linear(hidden_size, hidden_size)
        else:
            self.down, self.up = linear(hidden_size, self.rank), linear(self.rank, hidden_size)
        directed = self.sink_cosine is not None
        shifted = directed or self.sink_threshold is not None
        for name, wanted in (("bias", spec.get("bias")), ("shift", shifted)):
            zero = nn.Parameter(torch.zeros(hidden_size, **like)) if wanted else None
            self.register_parameter(name, zero)
        fixed = nn.Parameter(torch.zeros(hidden_size, **like), requires_grad=False)
        self.register_parameter("sink_direction", fixed if directed else None)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps (..., C) to (..., C) of the same dtype."""
        source = hidden_states
        if self.norm_eps is not None:
            states = hidden_states.float()
            mean = states.square().mean(dim=-1, keepdim=True)
            source = (states * torch.rsqrt(mean + self.norm_eps)).to(hidden_states.dtype)
        delta = self.map(source) if self.rank is None else self.up(self.down(source))
        if self.bias is not None:
            delta = delta + self.bias
        if self.shift is not None:
            states = hidden_states.float()
            norm = states.norm(dim=-1, keepdim=True)
            if self.sink_direction is None:
                sink = norm > self.sink_threshold
            else:
                direction: Any = self.sink_direction  # no matmul: autocast would round it
                score = (states * direction.float()).sum(dim=-1, keepdim=True)
                sink = score > self.sink_cosine * norm
            delta = torch.where(sink, self.shift.to(delta.dtype), delta)  # type: ignore[arg-type]
        return hidden_states + delta.to(hidden_states.dtype)


class _GhostLayer:
    """What a decoder layer with operators adds to its stock class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before, after = getattr(self, "ghost_input", None), getattr(self, "ghost_output", None)
        if before is not None and "hidden_states" in kwargs:
            kwargs["hidden_states"] = before(kwargs["hidden_states"])
        elif before is not None:
            args = (before(args[0]), *args[1:])
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if after is not None and isinstance(output, (tuple, list)):
            return type(output)((after(output[0]), *output[1:]))
        return output if after is None else after(output)


def _model_names(model_type: str) -> dict[str, tuple[str, ...]]:
    """Names of the stock classes behind AutoModel and AutoModelForCausalLM."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    base = modeling_auto.MODEL_MAPPING_NAMES.get(model_type, ())
    names = {"AutoModel": base, "AutoModelForCausalLM": causal}
    return {auto: (n,) if isinstance(n, str) else tuple(n) for auto, n in names.items()}


def older_keys(config: Mapping[str, Any], read: Callable[..., Any]) -> dict[str, Any]:
    """The keys that transformers 4 reads where 5 writes `rope_parameters`.

    Without them 4 rotates by another base, silently. With parameters per layer type, those of full
    attention are the ones without a prefix. Empty if `read`, which makes a config of a dict, would
    then find other parameters.
    """
    rope = config.get("rope_parameters") or {}
    main, local = rope.get("full_attention", rope) or {}, rope.get("sliding_attention")
    added = {k: main[k] for k in ("rope_theta", "partial_rotary_factor") if main.get(k) is not None}
    if "rope_theta" in added and main.get("rope_type", "default") != "default":
        added["rope_scaling"] = dict(main)
    if isinstance(local, dict) and "rope_theta" in local:
        added["rope_local_base_freq"] = local["rope_theta"]
    added = {k: v for k, v in added.items() if k not in config}
    if added:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read(copy.deepcopy({**config, **added})).rope_parameters
        added = added if found == rope else {}
    return added


class GhostConfig(PretrainedConfig):
    """The class behind the model_type "ghostlayers": reads config.json of any family."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Builds the Ghost config of the family that `base_model_type` names."""
        base = config_dict.get("base_model_type", "")
        if base not in CONFIG_MAPPING:
            raise ValueError(f"base_model_type must be known to transformers, got {base!r}")
        return _ghost(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs)


class _FamilyConfig:
    """What the Ghost config of a family adds to the stock config class."""

    base_model_type = ""

    def __init__(self, **kwargs: Any) -> None:
        found = kwargs.pop("base_model_type", self.base_model_type)
        if found != self.base_model_type:
            raise ValueError(f"base_model_type must be {self.base_model_type!r}, got {found!r}")
        labels = {k: v for k, v in (kwargs.pop("id2label", None) or {}).items() if k != SENTINEL}
        kwargs = {"ghost_decoder": "", "ghost_operators": [], **kwargs}
        super().__init__(id2label=labels or None, **kwargs)  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        """The stock dictionary, the names of the custom code, and the sentinel."""
        output: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        file, named = __name__.rpartition(".")[2], output.get("architectures") or ()
        output["auto_map"] = {"AutoConfig": f"{file}.{type(self).__name__}"}
        for auto, names in _model_names(self.base_model_type).items():
            name = ([n for n in names if f"Ghost{n}" in named] or names)[0]
            output["auto_map"][auto] = f"{file}.Ghost{name}"
        labels = (output.get("id2label") or {}).items()
        labels = {str(key): label for key, label in labels if label != f"LABEL_{key}"}
        output |= {"base_model_type": self.base_model_type, "id2label": {SENTINEL: "", **labels}}
        return output | older_keys(output, lambda values: type(self)(**values))


class _FamilyModel:
    """What the Ghost models of a family add to the stock model classes."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Not by class: transformers may execute this file again, and its classes are then new ones,
        # while a config that came from another process is of the old ones (vLLM's workers).
        if getattr(type(config), "model_type", None) != MODEL_TYPE:
            raise ValueError(f"{type(self).__name__} needs a Ghost config, got {type(config)}")
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        base = self.base_model  # type: ignore[attr-defined]
        if base is self or not isinstance(base, _FamilyModel):
            _install(self, config.ghost_operators, config.ghost_decoder)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, GhostOperator) or getattr(module, "_ghost_part", False):
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _initialize_weights(self, module: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        # Transformers takes the flag "custom code" as a reason not to compute the non-persistent
        # buffers of modules without parameters of their own (falcon_h1's mup_vector).
        super()._initialize_weights(module)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Like the stock method, but raises RuntimeError if an operator tensor does not fit."""
        wants_info = kwargs.pop("output_loading_info", False)
        lenient = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with _converting(cls):
            model, info = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        for kind in ("missing", "mismatched", "unexpected"):
            keys = sorted(k if isinstance(k, str) else k[0] for k in info[f"{kind}_keys"])
            every = kind == "mismatched" and not lenient
            if keys := [key for key in keys if every or ".ghost_" in key]:
                raise RuntimeError(f"checkpoint has {kind} tensors: {', '.join(keys)}")
        return (model, info) if wants_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Like the stock method."""
        with _converting(type(self)):
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _claim_conversion(name: str, stock: Any) -> dict[str, Any]:
    """Gives a class the weight conversion of its stock class (experts are fused on loading).

    Transformers 5 looks it up by class name (since 5.9; before, only by model type) and leaves
    custom code out. Returns the conversions by name, so that a claim can be taken back.
    """
    conversion = sys.modules.get("transformers.conversion_mapping")
    if conversion is None:
        return {}
    get = conversion.get_checkpoint_conversion_mapping
    if mapping := get(stock.__name__) or get(stock.config_class.model_type):
        if not hasattr(conversion, "extract_weight_conversions_for_model"):
            raise RuntimeError(f"{name} needs transformers>=5.9, got {transformers.__version__}")
        conversion.register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    claimed: dict[str, Any] = conversion._checkpoint_conversion_mapping_cache
    return claimed


@contextlib.contextmanager
def _converting(cls: Any) -> Iterator[None]:
    """Lets a base model convert its weights when it is the outermost model, and only then.

    Inside a causal LM, whose own claim covers it, its weights would be converted twice.
    """
    claimed: dict[str, Any] = {}
    if cls._auto_class == "AutoModel":
        claimed = _claim_conversion(cls.__name__, cls.__mro__[2])
    try:
        yield
    finally:
        claimed.pop(cls.__name__, None)


def _ghost(stock: Any) -> Any:
    """The Ghost class of a stock config, model or decoder layer class; always the same object."""
    if stock in _CLASSES:
        return _CLASSES[stock]
    name, bases = f"Ghost{stock.__name__}", (_GhostLayer, stock)  # type: tuple[str, Any]
    body: dict[str, Any] = {"__module__": __name__, "__qualname__": name, "__doc__": stock.__doc__}
    if issubclass(stock, PretrainedConfig):
        bases, body["_auto_class"] = (_FamilyConfig, stock), "AutoConfig"
        body |= {"model_type": MODEL_TYPE, "base_model_type": stock.model_type}
        # In the body, or the dataclass decorator of transformers 5 generates others.
        body |= {"__init__": _FamilyConfig.__init__, "__eq__": PretrainedConfig.__eq__}
    elif issubclass(stock, PreTrainedModel):
        bases, body["config_class"] = (_FamilyModel, stock), _ghost(stock.config_class)
        model_type = stock.config_class.model_type
        causal = stock.__name__ in _model_names(model_type)["AutoModelForCausalLM"]
        body["_auto_class"] = "AutoModelForCausalLM" if causal else "AutoModel"
        if causal:
            _claim_conversion(name, stock)
    ghost = _CLASSES.setdefault(stock, type(name, bases, body))
    if issubclass(stock, PretrainedConfig):
        for auto, models in _model_names(stock.model_type).items():
            for model in models[:1]:
                model_class = _ghost(getattr(transformers, model))
                getattr(transformers, auto).register(ghost, model_class, exist_ok=True)
    return ghost


def __getattr__(name: str) -> Any:
    """Finds the stock class, exported or in a modeling file imported so far, and extends it."""
    found, wanted = [], name.removeprefix("Ghost")
    if name.startswith("Ghost"):
        files = [m for n, m in sys.modules.items() if m and n.startswith("transformers.models.")]
        found = [getattr(transformers, wanted, None), *(vars(file).get(wanted) for file in files)]
    for stock in found:
        if isinstance(stock, type) and issubclass(stock, (PretrainedConfig, nn.Module)):
            return _ghost(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _decoder(model: Any, path: str) -> tuple[nn.ModuleList, list[Any]]:
    """The decoder layers, and every PreTrainedModel from `model` down to them."""
    steps = [model, model.base_model]
    for name in path.split("."):
        steps.append(getattr(steps[-1], name, None))
    if not isinstance(steps[-1], nn.ModuleList):
        raise ValueError(f"decoder_path must lead to a ModuleList, got {path!r} in {type(model)}")
    return steps[-1], [step for step in steps if isinstance(step, PreTrainedModel)]


def _install(model: Any, specs: Specs, path: str) -> list[GhostOperator]:
    """Adds zero operators to a model whose config is a Ghost config already."""
    (layers, owners), operators = _decoder(model, path), []
    hidden_size = model.config.get_text_config().hidden_size
    for spec in _check_specs(specs, len(layers), hidden_size):
        layer = layers[spec["layer"]]
        floats = [p for p in layer.parameters() if p.is_floating_point() and p.element_size() > 1]
        like = max(floats, key=torch.Tensor.numel)  # a matrix: norms may be kept in float32
        device = like.device
        if like.is_meta and "_hf_hook" in vars(layer):  # offloaded: where accelerate computes it
            device = layer._hf_hook.execution_device or device
        operators.append(GhostOperator(hidden_size, spec, device=device, dtype=like.dtype))
        setattr(layer, f"ghost_{spec['side']}", operators[-1].train(layer.training))
        if type(layer) not in _CLASSES.values():
            layer.__class__ = _ghost(type(layer))
        if "_old_forward" in vars(layer):  # accelerate keeps the bound forward of the old class
            layer._old_forward = types.MethodType(type(layer).forward, layer)
    names, registry = {type(layer).__name__ for layer in layers}, vars(modeling_utils)
    for owner in owners:
        if not isinstance(owner, _FamilyModel):
            owner.__class__ = _ghost(type(owner))
        owner._no_split_modules = {*(owner._no_split_modules or ()), *names}
        recorded = getattr(owner, "_can_record_outputs", None)  # looked up by the class's name
        dict.__setitem__(registry["_CAN_RECORD_REGISTRY"], str(type(owner)), recorded)
    return operators


def _convert_config(config: Any, specs: Specs, path: str, architecture: str) -> None:
    """Turns a stock config object into its Ghost config, in place, once all is checked."""
    family = config.model_type
    if family not in CONFIG_MAPPING or type(config) is not CONFIG_MAPPING[family]:
        raise ValueError(f"config must be of a stock transformers class, got {type(config)}")
    allowed = _model_names(family)["AutoModelForCausalLM"]
    if architecture not in allowed:
        raise ValueError(f"architecture must be one of {list(allowed)}, got {architecture!r}")
    config.__class__ = _ghost(type(config))
    config.ghost_decoder, config.ghost_operators = path, [dict(spec) for spec in specs]
    config.architectures = [f"Ghost{architecture}"]


def attach_operators_(
    model: PreTrainedModel, specs: Specs, *, decoder_path: str
) -> list[GhostOperator]:
    """Converts a stock model into its Ghost class in place and adds operators, all zero.

    Args:
        model: a causal LM of a transformers class, pruned already.
        specs: dicts of "layer", "side" and, optional, "rank", "bias", "norm_eps", and
            "sink_threshold" or "sink_cosine".
        decoder_path: dotted path from the base model to the decoder layers, such as "layers".

    Returns:
        The operators in the order of `specs`.

    Raises:
        ValueError: the model, a spec or the path is not usable; the model is then unchanged.
    """
    if not isinstance(model, PreTrainedModel) or isinstance(model, _FamilyModel):
        raise ValueError(f"model must be a stock PreTrainedModel, got {type(model)}")
    layers, _ = _decoder(model, decoder_path)
    specs = _check_specs(specs, len(layers), model.config.get_text_config().hidden_size)
    for index in [spec["layer"] for spec in specs]:
        state = vars(layers[index])
        if "forward" in state and "_old_forward" not in state:
            raise ValueError(f"layer {index} must have its class's forward, got a replaced one")
    _convert_config(model.config, specs, decoder_path, type(model).__name__)
    return _install(model, specs, decoder_path)


def ghost_config_dict(
    config: PretrainedConfig, specs: Specs, *, decoder_path: str, architecture: str
) -> dict[str, Any]:
    """Returns config.json of a checkpoint with operators; the stock `config` stays as it is.

    `architecture` is a stock class name like "LlamaForCausalLM"; else see `attach_operators_`.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    specs = _check_specs(specs, text.num_hidden_layers, text.hidden_size)
    _convert_config(config, specs, decoder_path, architecture)
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return written


def register() -> None:
    """Lets the Auto classes load "ghostlayers" checkpoints without trust_remote_code."""
    transformers.AutoConfig.register(MODEL_TYPE, GhostConfig, exist_ok=True)


if __name__ == "ghostlayers.modeling_ghostlayers":  # not where it is a checkpoint's remote code
    register()
