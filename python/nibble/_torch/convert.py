"""Converting the layers of a model."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any, Callable, Iterable, Mapping, Union

import torch
from torch import Tensor, nn

import nibble
from nibble._torch import experts
from nibble._torch.fuse import Fused
from nibble._torch.fuse import fuse as _fuse  # convert() has an argument of its name
from nibble._torch.layers import _float_weight, _parts, QuantConv2d, _Quantized, QuantLinear
from nibble._torch.weights import _COMPUTED
from nibble.errors import InvalidArgument, NotFound, Unsupported

_SKIP = r"(^|\.)(lm_head|embed_tokens|wte|wpe|word_embeddings|position_embeddings|token_type_embeddings)$"


def read_module(module: nn.Module, config: Mapping[str, Any] | None = None) -> nibble.QuantTensor:
    """Decodes a quantized layer of any class by the names of its tensors: qweight, qzeros, scales, g_idx (AWQ, GPTQ),
    weight_packed, weight_scale, weight_zero_point (compressed-tensors), weight, weight_scale_inv (FP8), ...

    config: the model's quantization_config. Raises NotFound when no format has such tensors.
    """
    own = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    # Engines keep parts empty that a layer does not have.
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own if tensor is not None and tensor.numel() > 0}
    facts = dict(config or {})
    for ours, theirs in (("bits", "bits"), ("bits", "w_bit"), ("group_size", "group_size"), ("desc_act", "desc_act"), ("sym", "sym")):
        value = getattr(module, theirs, None)
        if isinstance(value, (bool, int)) and "qweight" in tensors:
            facts.setdefault(ours, value)
    g_idx = tensors.get("g_idx")
    if g_idx is not None and bool((g_idx[1:] < g_idx[:-1]).any()):
        facts.setdefault("desc_act", True)
    zero_format = getattr(module, "qzero_format", None)
    if callable(zero_format):  # GPTQModel changes v1 to v2 when loading; the config still says v1
        facts["checkpoint_format"] = "gptq_v2" if zero_format() == 2 else "gptq"
    return nibble.read_tensors(tensors, facts or None)


def _has_codes(module: nn.Module) -> bool:
    """Whether there is a matrix of integers or FP8 among its tensors."""
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return any(t.ndim == 2 and t.numel() > 0 and (t.element_size() == 1 or t.dtype == torch.int32) for t in own)


def _divides(scheme: str, channels: int) -> bool:
    """Whether groups of this many channels, if there are any, divide them evenly."""
    group = re.search(r"g(\d+)$", scheme)
    return group is None or channels % int(group[1]) == 0


_Rule = Union[str, "re.Pattern[str]", Callable[[str], Any]]


class Converted(list[str]):
    """The names of the layers that convert() replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}
        """The layers that are float still, and why."""
        self.fused: Fused | None = None
        """What fuse() answered, where it was asked for."""


class _Skip:
    """Which layers are to be left, by name; and which rules took none."""

    def __init__(self, rules: _Rule | Iterable[_Rule] | None) -> None:
        alone = isinstance(rules, (str, re.Pattern)) or callable(rules)
        each: Any = [rules] if alone else rules or ()
        self._tests = [(rule, self._test(rule, alone)) for rule in each]
        self.idle = {str(getattr(rule, "pattern", rule)): rule for rule, _ in self._tests if not callable(rule) and rules != _SKIP}

    @staticmethod
    def _test(rule: Any, alone: bool) -> Callable[[str], Any]:
        if callable(rule):
            return rule
        if isinstance(rule, str) and not alone:
            return lambda name: f".{rule}." in f".{name}."
        if not isinstance(rule, (str, re.Pattern)):
            raise TypeError(f"skip: {rule!r} is neither a name, nor a pattern, nor a function")
        try:
            return re.compile(rule).search
        except re.error as problem:
            raise InvalidArgument(f"skip: {rule!r} is no regular expression: {problem}") from None

    def __call__(self, name: str) -> bool:
        took = [rule for rule, test in self._tests if test(name)]
        for rule in took:
            self.idle.pop(str(getattr(rule, "pattern", rule)), None)
        return bool(took)


def _has_weights(module: nn.Module) -> bool:
    """Whether it is a layer of some kind: matrices of floats among its own parameters, which are not looked up by rows."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(module).__name__:
        return False
    own = [(name, p) for name, p in module.named_parameters(recurse=False) if p.is_floating_point()]
    return any(p.ndim == 2 and "weight" in name or p.ndim > 2 and p.shape[0] > 1 for name, p in own)


def _why_not(module: nn.Module, weight: Tensor | None, scheme: str, act_scheme: str, conv: bool) -> str:
    """Why a float layer is left; "" where it is not."""
    kind = type(module).__name__
    if next(module.children(), None) is not None and (weight is not None or isinstance(module, nn.Conv2d)):
        return f"{kind} has modules of its own, as of parametrizations, which would be lost"
    if weight is not None:
        return "" if _divides(scheme, weight.shape[1]) else f"{scheme}: its groups do not divide K={weight.shape[1]}"
    if isinstance(module, nn.MultiheadAttention) or kind == "NonDynamicallyQuantizableLinear":
        return "torch.nn.MultiheadAttention reads its weights itself"
    dtype = module.weight.dtype if isinstance(module, (nn.Linear, nn.Conv2d)) else torch.float32
    if dtype not in _COMPUTED:
        return f"its weight is {dtype}; nibble quantizes float32, float16 and bfloat16"
    if not isinstance(module, nn.Conv2d):
        return f"{kind} is no layer that nibble has"
    if not conv:
        return "a convolution, which conv=True takes"
    inputs, channels = module.weight[0].numel(), module.weight.shape[1]
    if not _divides(scheme, inputs):
        return f"{scheme}: its groups do not divide K={inputs}"
    return "" if _divides(act_scheme, channels) else f"{act_scheme}: its groups do not divide {channels} channels"


def _sentence(left: Mapping[str, str]) -> str:
    """ "up, down (K is too odd); conv1 (a convolution)" """
    groups: dict[str, list[str]] = {}
    for name, why in left.items():
        groups.setdefault(why, []).append(name)
    more = {why: f" and {len(names) - 3} more" if len(names) > 3 else "" for why, names in groups.items()}
    return "; ".join(f"{', '.join(names[:3])}{more[why]} ({why})" for why, names in groups.items())


def _convert_experts(
    module: nn.Module, name: str, scheme: str, places: dict[int, list[tuple[nn.Module, str]]], skipped: _Skip, converted: Converted
) -> None:  # fmt: skip
    """Replaces the experts of a layer by QuantExperts, unless they are to be skipped or are not of a kind that it has."""
    if skipped(name):
        converted.left[name] = "skip"
        return
    try:
        layer = experts.from_module(module, scheme)
    except Unsupported as problem:
        converted.left[name] = str(problem)
        return
    except nibble.Error as problem:
        raise type(problem)(f"{name}: {problem}") from None
    for parent, child in places[id(module)]:
        setattr(parent, child, layer)
    converted.append(name)


def _convert_head(model: nn.Module, scheme: str, options: Mapping[str, Any]) -> str:
    """Quantizes the output head; its name."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    names = (name for name, module in model.named_modules() if (module is output if output is not None else name.endswith("lm_head")))
    name = next(names, None)
    if name is None:
        raise NotFound(f"head={scheme!r}, but {type(model).__name__} has none: neither get_output_embeddings() nor a layer lm_head")
    layer = model.get_submodule(name)
    act_scheme, weight_scheme = _parts(scheme)
    weight = _float_weight(layer)
    why = f"it is {type(layer).__name__}" if weight is None else _why_not(layer, weight, weight_scheme, act_scheme, False)
    if weight is not None and weight.is_meta:
        why = "its weights are on the meta device; load them first"
    if why:
        raise InvalidArgument(f"head={scheme!r}, but {name} is no layer to quantize: {why}")
    model.set_submodule(name, QuantLinear.from_float(layer, scheme, **options))
    config = getattr(model, "config", None)
    if any(p is weight for p in model.parameters()) and config is not None:  # loaders would tie them again
        for each in {id(c): c for c in (config, getattr(config, "get_text_config", lambda: config)())}.values():
            each.tie_word_embeddings = False
    return name


def convert(
    model: nn.Module,
    scheme: str = "u4b8g128",
    *,
    skip: _Rule | Iterable[_Rule] | None = _SKIP,
    config: Mapping[str, Any] | None = None,
    device: Any = None,
    conv: bool = False,
    accumulation: str = "fast",
    fuse: bool = False,
    head: str | None = None,
) -> Converted:
    """Replaces the linear layers of `model` by QuantLinear, with `conv` also every nn.Conv2d by QuantConv2d; in place; returns names.

    Quantized layers (AWQ, GPTQ, compressed-tensors, FP8: whatever nibble reads) keep their numbers; float ones are quantized to
    `scheme`, "u4b8g128", or with activations "s8r_s8c"; its first part goes for all. A float layer whose K the groups do not divide is left;
    of a convolution K is all that goes into an output, Kh·Kw·C/groups, and blocks of activations have to divide C/groups.

    The result's `left` says which layers are float still, and why. A warning says so too, but for those that skip names.
    skip: a regular expression searched in names; a function of a name; or a list of these and of names, whole or in part: "lm_head",
    "mlp.gate", "layers.0". By default heads and embeddings. A rule that takes no layer is warned of.
    config: model.config's quantization_config unless given. device: where to run; by default where the layer is. accumulation: as
    nibble.pack has it. fuse: joins the layers of decoder blocks then, as fuse() does, whose answer is the result's `fused`.
    head: the scheme of the output head, model.get_output_embeddings() or `lm_head`, which skip leaves by default: "u8b128g128". A head that
    was tied to the embedding has numbers of its own then.
    Raises NotFound for a head that there is not, InvalidArgument for one that is quantized already, and what reading or quantizing a layer
    does, with its name; the layers before it are converted then.
    """
    if _has_weights(model):
        raise InvalidArgument(f"the model is itself a {type(model).__name__}, which cannot be replaced in place; see QuantLinear.from_float")
    skipped = _Skip(skip)
    if config is None:
        config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None and not isinstance(config, Mapping):
        config = config.to_dict()
    act_scheme, weight_scheme = _parts(scheme)
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # where a module is; some are shared
    for parent in model.modules():
        for child, module in parent.named_children():
            places.setdefault(id(module), []).append((parent, child))
    options = {"accumulation": accumulation} if device is None else {"accumulation": accumulation, "device": device}
    converted = Converted()
    if head is not None:
        converted.append(_convert_head(model, head, options))
    for name, module in list(model.named_modules()):
        if experts.are_experts(module):
            _convert_experts(module, name, scheme, places, skipped, converted)
            continue
        weight = _float_weight(module)
        codes = weight is None and next(module.children(), None) is None and _has_codes(module)
        if isinstance(module, _Quantized) or not (codes or _has_weights(module)):
            continue
        if skipped(name):
            if not codes:
                converted.left[name] = "skip"
            continue
        if not codes:
            why = _why_not(module, weight, weight_scheme, act_scheme, conv)
            if why:
                converted.left[name] = why
                continue
        own = next(itertools.chain(module.parameters(), module.buffers()))
        layer: nn.Module
        try:
            if own.is_meta:
                raise InvalidArgument("its weights are on the meta device; load them first")
            if weight is not None:
                layer = QuantLinear.from_float(module, scheme, **options)
            elif codes:
                q = read_module(module, config)
                layer = QuantLinear(q, **{"act_scheme": act_scheme, "device": own.device, "dtype": _type_around(module, model), **options})
            else:
                layer = QuantConv2d.from_float(module, scheme, **options)
        except NotFound:  # no layer of a format's
            continue
        except nibble.Error as problem:
            raise type(problem)(f"{name}: {problem}") from None
        for parent, child in places[id(module)]:
            setattr(parent, child, layer)
        converted.append(name)
    left = {name: why for name, why in converted.left.items() if why != "skip"}
    if left:
        count = len(converted) + len(converted.left)
        warnings.warn(f"nibble.torch.convert left {len(left)} of {count} layers float: {_sentence(left)}", stacklevel=2)
    elif not converted and not any(isinstance(module, _Quantized) for module in model.modules()):
        why = "skip takes every layer" if converted.left else "there is no layer of a kind that nibble has"
        warnings.warn(f"nibble.torch.convert converted nothing: {why}", stacklevel=2)
    if skipped.idle:
        warnings.warn(f"nibble.torch.convert: skip takes no layer by {', '.join(map(repr, skipped.idle))}", stacklevel=2)
    if fuse:
        converted.fused = _fuse(model)
    return converted


def _type_around(module: nn.Module, model: nn.Module) -> torch.dtype | None:
    """In which a quantized layer's model computes: of the first 16-bit floats in the layer or in the model; None where all are f32."""
    tensors = itertools.chain(module.parameters(), module.buffers(), model.parameters())
    return next((t.dtype for t in tensors if t.dtype in (torch.float16, torch.bfloat16)), None)
