"""nibble for transformers: from_pretrained makes models whose linear layers run on nibble's kernels, on the CPU or one GPU.

    import nibble.transformers
    model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-AWQ")     # AWQ, GPTQ, compressed-tensors, FP8: their numbers
    model = AutoModelForCausalLM.from_pretrained("Llama-3-8B", quantization_config=nibble.transformers.NibbleConfig("u4zg128"))

Quantized checkpoints need neither the package that made them nor a GPU. Layers are read from the mapped files and packed one after the
other: besides the packed model there is one layer in memory. save_pretrained writes the format that was read, or compressed-tensors.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import re
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.utils.quantization_config import QuantizationConfigMixin

import nibble
import nibble.torch as nt
from nibble import _arrays, _core
from nibble._torch.convert import _SKIP, _Skip, _why_not
from nibble._torch.experts import activation_of, are_experts
from nibble._torch.fuse import _Block
from nibble._torch.layers import _float_weight, _parts
from nibble._torch.shards import _replace
from nibble.errors import InvalidArgument, NotFound, Unsupported

__all__ = ["CheckpointConfig", "METHODS", "NibbleConfig", "NibbleQuantizer", "register", "unregister"]

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")
"""The quant_method of checkpoints that nibble loads in place of transformers, once this module is imported."""


def __dir__() -> list[str]:
    return __all__


class NibbleConfig(QuantizationConfigMixin):
    """Quantizes float layers while they are loaded.

    scheme: as nibble.torch.convert has it: "u4b8g128", "u4zg128", "s8r_s8c", ... skip: names, whole or in part, or one regular expression;
    by default heads and embeddings. The model's own head is skipped in any case, since it may be new. head: its scheme, if it is to be
    quantized, too: "u8b128g128". accumulation: as nibble.pack has it. fuse: joins the layers of decoder blocks, as nibble.torch.fuse(model)
    does with any model that has been loaded.
    Raises InvalidArgument for a scheme or an expression that is none.
    """

    def __init__(
        self, scheme: str = "u4b8g128", *, skip: str | Sequence[str] = _SKIP, accumulation: str = "fast", fuse: bool = False,
        head: str | None = None, quant_method: str = "nibble",
    ) -> None:  # fmt: skip
        for each in (scheme,) if head is None else (scheme, head):
            _parts(each)  # refuses activations that are none
        _Skip(skip)
        self.quant_method, self.scheme, self.accumulation, self.fuse, self.head = quant_method, scheme, accumulation, fuse, head
        self.skip: Any = skip if isinstance(skip, str) else list(skip)


class CheckpointConfig(QuantizationConfigMixin):
    """The quantization_config of a quantized checkpoint, as it is."""

    def __init__(self, quant_method: str, **config: Any) -> None:
        self.quant_method = quant_method
        self.__dict__.update(config)


def _act_scheme(module: nibble.Module) -> str:
    """How the checkpoint says that its activations are quantized; "" where they are not."""
    claimed = module.claimed or ""
    return _core.act_scheme(claimed) if "_" in claimed else ""


class _Unread(nn.Module):
    """In the place of a linear layer until its weight is read from the checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class _UnreadExperts(nn.Module):
    """In the place of the experts of a layer until their weights are read: by tensor of the model, expert and place among those that it joins."""

    def __init__(self, module: nn.Module, of: Any) -> None:
        super().__init__()
        if not are_experts(module):
            raise Unsupported(f"it is inside {type(module).__name__} of {of}, whose experts nibble does not have")
        self.activation, self.limits = activation_of(module)
        self.count = module.down_proj.shape[0]
        self.names: dict[str, dict[tuple[int, int], str]] = {"gate_up_proj": {}, "down_proj": {}}


class NibbleQuantizer(HfQuantizer):
    """What from_pretrained and save_pretrained ask."""

    requires_calibration = False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises Unsupported for a device_map with several devices."""
        if isinstance(device_map, Mapping) and len(set(map(str, device_map.values()))) > 1:
            raise Unsupported(f"device_map has the devices {sorted(set(map(str, device_map.values())))}; nibble loads a model to one")

    # --- loading ---

    def _process_model_before_weight_loading(
        self, model: Any, dtype: torch.dtype | None = None, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        """Puts what will be read later in the place of linear layers, so that transformers loads the rest alone."""
        self._dtype, self._written = dtype, {}
        self._float = isinstance(self.quantization_config, NibbleConfig)
        self._skip = self._rules(model) if self._float else []
        files = [pathlib.Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            if self._float:
                return  # converted when it is loaded
            raise Unsupported("nibble reads quantized checkpoints from .safetensors files")
        self._checkpoint = nibble.open(files[0].parent if len(files) > 1 or files[0].name == "model.safetensors" else files[0])
        modules, ignored = dict(model.named_modules()), set(model._keys_to_ignore_on_load_unexpected or ())
        for name, own, inside in list(self._places(model)):
            layer, parent = modules.get(own), own.rpartition(".")[0]
            if inside is not None:
                self._place_expert(model, name, own, inside)
                ignored |= {f"^{re.escape(name)}\\.", f"^{re.escape(own)}"}
                continue
            if not isinstance(layer, nn.Linear):
                if not self._float and parent and parent in modules:
                    raise Unsupported(f"{name}: {own} is no linear layer of {type(model).__name__}")
                continue  # of another head
            if self._float and self._why_float(own, layer):
                continue
            model.set_submodule(own, _Unread(name))
            ignored |= {f"^{re.escape(name)}\\.", f"^{re.escape(own)}\\."}
        if not self._float and not any(isinstance(module, (_Unread, _UnreadExperts)) for module in model.modules()):
            raise NotFound(f"{self._checkpoint.path}: no quantized layer is one of {type(model).__name__}")
        model._keys_to_ignore_on_load_unexpected = ignored

    def _places(self, model: Any) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
        """The layers of the checkpoint that are to be quantized layers of the model, and what they are called there. Of one that is inside a
        tensor of experts: the tensor's name, the expert, and the place among the layers that the tensor joins."""
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        state = model.state_dict()
        for module in self._checkpoint.modules if self._float else self._checkpoint.layers:
            key = f"{module.name}.weight"
            own, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if pattern is None:
                yield module.name, own.removesuffix(".weight"), None
            elif not self._float:
                joined = next(c.source_patterns for c in converters if pattern in c.source_patterns)
                expert = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), key)
                if expert is None or not expert.groups():
                    raise Unsupported(f"{module.name}: {type(model).__name__} keeps its weight inside {own}, together with others")
                yield module.name, own, (int(expert[1]), joined.index(pattern))

    @staticmethod
    def _place_expert(model: Any, name: str, own: str, inside: tuple[int, int]) -> None:
        parent, _, tensor = own.rpartition(".")
        try:
            experts = model.get_submodule(parent)
            if not isinstance(experts, _UnreadExperts):
                experts = _UnreadExperts(experts, type(model).__name__)
                model.set_submodule(parent, experts)
            experts.names[tensor][inside] = name
        except (AttributeError, KeyError, nibble.Error) as problem:
            raise Unsupported(f"{name}: {type(model).__name__} keeps its weight inside {own}: {problem}") from None

    def _why_float(self, name: str, layer: nn.Linear) -> str:
        """Why a float layer stays so; "" where it does not."""
        act_scheme, scheme = _parts(self.quantization_config.scheme)
        return "skip" if _Skip(self._skip)(name) else _why_not(layer, _float_weight(layer), scheme, act_scheme, False)

    def _rules(self, model: Any) -> list[Any]:
        """What is skipped: what the config says, and the model's own heads, which may be new."""
        skip, heads = self.quantization_config.skip, frozenset(get_keys_to_not_convert(model))
        own = list(skip) if not isinstance(skip, str) else [_Skip(skip) if skip == _SKIP else re.compile(skip)]
        return [*own, heads.__contains__]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        dtype = self._dtype or model.dtype
        modules = {module.name: module for module in self._checkpoint.modules} if hasattr(self, "_checkpoint") else {}
        for own, unread in [(name, module) for name, module in model.named_modules() if isinstance(module, _Unread)]:
            try:
                q, options = self._quantized(modules[unread.name]) if self._float else self._read(modules[unread.name])
                model.set_submodule(own, nt.QuantLinear(q, **options, device=device, dtype=dtype))
            except nibble.Error as problem:
                raise type(problem)(f"{unread.name}: {problem}") from None
            del q  # before the next one is read
            if not self._float:
                self._written[own] = modules[unread.name].format
        for own, unread in [(name, module) for name, module in model.named_modules() if isinstance(module, _UnreadExperts)]:
            model.set_submodule(own, self._experts(own, unread, modules, device))
        if hasattr(self, "_checkpoint"):
            del self._checkpoint
        if self._float:
            config = self.quantization_config
            nt.convert(model, config.scheme, skip=self._skip, accumulation=config.accumulation, fuse=config.fuse, head=config.head)

    def _experts(self, own: str, unread: _UnreadExperts, modules: Mapping[str, nibble.Module], device: torch.device) -> nt.QuantExperts:
        """The experts of a layer, read and packed one by one."""

        def packed(tensor: str, **glu: Any) -> nibble.PackedExperts:
            names = unread.names[tensor]
            parts = 1 + max((place for _, place in names), default=0)
            if set(names) != set(itertools.product(range(unread.count), range(parts))):
                raise NotFound(f"{len(names)} of the {unread.count * parts} layers inside {tensor} are quantized in {self._checkpoint.path}")
            act_schemes = {_act_scheme(modules[name]) for name in names.values()}
            if len(act_schemes) > 1:
                raise Unsupported(f"the layers inside {tensor} quantize activations by {sorted(act_schemes)}; experts have one rule for all")
            read = ([self._checkpoint.read(modules[names[e, place]]) for place in range(parts)] for e in range(unread.count))
            return nibble.pack_experts(map(nibble.join, read), act_scheme=act_schemes.pop(), **glu)

        try:
            return nt.QuantExperts(packed("gate_up_proj", glu=True, **unread.limits), packed("down_proj"), unread.activation).to(device)
        except nibble.Error as problem:
            raise type(problem)(f"{own}: {problem}") from None

    def _read(self, module: nibble.Module) -> tuple[nibble.QuantTensor, dict[str, Any]]:
        return self._checkpoint.read(module), {"act_scheme": _act_scheme(module)}

    def _quantized(self, module: nibble.Module) -> tuple[nibble.QuantTensor, dict[str, Any]]:
        config = self.quantization_config
        act_scheme, scheme = _parts(config.scheme)
        q = nibble.quantize(self._checkpoint.tensor(f"{module.name}.weight"), scheme)
        if module.has_bias:
            q = _replace(q, bias=self._checkpoint.tensor(f"{module.name}.bias"))
        return q, {"act_scheme": act_scheme, "accumulation": config.accumulation}

    # --- saving ---

    def is_serializable(self) -> bool:
        """Whether save_pretrained can write the model."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of the format that was read, else of compressed-tensors; the model's config says so from then on.

        A fused model is written as the layers it was fused of, under their names. Raises Unsupported where experts are quantized, which no
        format has inside one tensor."""
        self._refuse_experts(model, "save_pretrained")
        fused = [module for module in model.modules() if isinstance(module, _Block)]
        if fused:
            nt.unfuse(model)
            try:
                return self.get_state_dict_and_metadata(model)
            finally:
                for block in fused:
                    nt.fuse(block)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nt.QuantLinear)}
        state = {key: t for key, t in model.state_dict().items() if not (key.endswith(".packed") and key.removesuffix(".packed") in layers)}
        written = []
        for name, layer in layers.items():
            q, act_scheme = layer.weight.unpack(), layer.weight.act_scheme
            scheme = f"{act_scheme}_{q.scheme}" if act_scheme else q.scheme
            format = self._format(name, q.scheme)
            try:
                tensors = _core.write_module(q, format, act_scheme)
            except nibble.Error as problem:
                raise type(problem)(f"{name}: {problem}") from None
            for suffix, (dtype, shape, data) in tensors.items():
                state[f"{name}.{suffix}"] = torch.frombuffer(bytearray(data), dtype=getattr(torch, _arrays.NAMES[dtype])).view(shape)
            written.append((name, format, scheme, q.g_idx is not None))
        left = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if written:
            formats = collections.Counter(format for _, format, _, _ in written)
            config = json.loads(_core.write_config(formats.most_common(1)[0][0], written, left))
            model.config.quantization_config = self.quantization_config = CheckpointConfig(**config)
        return state, {}

    @staticmethod
    def _refuse_experts(model: Any, what: str) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nt.QuantExperts):
                raise Unsupported(f"{name}: {what} has no form for quantized experts inside one tensor; use the model that they were quantized from")

    def _format(self, name: str, scheme: str) -> str:
        writable = {format.name for format in nibble.formats() if format.can_write}
        if self._written.get(name) in writable:
            return self._written[name]
        return "float-quantized" if scheme.startswith("e4m3") else "int-quantized" if scheme.startswith("s8") else "compressed-tensors"

    # --- what models can do then ---

    @property
    def is_trainable(self) -> bool:
        """Whether adapters beside the layers can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether torch.compile takes the model."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        self._refuse_experts(model, "dequantize")
        nt.unfuse(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # as save_pretrained leaves it
        for name, layer in [(name, module) for name, module in model.named_modules() if isinstance(module, nt.QuantLinear)]:
            dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.weight.has_bias, device="meta", dtype=dtype)
            dense.weight = nn.Parameter(layer.dequantize(dtype or torch.float32), requires_grad=False)
            if layer.weight.has_bias:
                dense.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
            model.set_submodule(name, dense)
        return model


_before: dict[str, tuple[Any, Any]] = {}


def register(methods: Sequence[str] = METHODS) -> None:
    """Loads checkpoints of these quant_methods with nibble, as importing this module does for METHODS."""
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise InvalidArgument(f"{unknown[0]!r} is no quant_method that nibble reads; choose of {', '.join(METHODS)}")
    AUTO_QUANTIZER_MAPPING["nibble"], AUTO_QUANTIZATION_CONFIG_MAPPING["nibble"] = NibbleQuantizer, NibbleConfig
    for method in methods:
        _before.setdefault(method, (AUTO_QUANTIZER_MAPPING.get(method), AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)))
        AUTO_QUANTIZER_MAPPING[method], AUTO_QUANTIZATION_CONFIG_MAPPING[method] = NibbleQuantizer, CheckpointConfig


def unregister(methods: Sequence[str] = METHODS) -> None:
    """Gives these quant_methods back to transformers."""
    for method in methods:
        quantizer, config = _before.pop(method, (None, None))
        for mapping, what in ((AUTO_QUANTIZER_MAPPING, quantizer), (AUTO_QUANTIZATION_CONFIG_MAPPING, config)):
            if what is not None:
                mapping[method] = what


register()
