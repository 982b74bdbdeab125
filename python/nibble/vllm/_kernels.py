"""The classes that vLLM chooses from, each for one of its kinds of quantized layers. Needs vLLM.

A layer's weight is packed once, after loading, into one tensor of bytes, which takes the place of the layer's weight parameter; the other
parameters of the weight are left empty. A call is the operator torch.ops.nibble.linear.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import vllm
from torch import Tensor, nn

try:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear import register_linear_kernel
except ImportError as problem:
    raise ImportError(f"vLLM {vllm.__version__} has no register_linear_kernel; nibble.vllm is tested with 0.24 and 0.33") from problem
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.base import FP8Params, MMLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform

import nibble
import nibble.torch as nt
from nibble._torch.weights import _header
from nibble.errors import Unsupported
from nibble.vllm import _weights

_logger = init_logger("vllm.nibble")

_OWN = "nibble_packed"


def _backend() -> str:
    return "cpu" if current_platform.is_cpu() else "cuda"


def _is_read_by_vllm(layer: nn.Module) -> bool:
    """Whether vLLM reads the FP8 weight itself after loading: multi-head latent attention takes kv_b_proj apart."""
    return getattr(layer, "prefix", "").endswith("kv_b_proj")


def _hold(
    kernel: Any, layer: nn.Module, read: Callable[[], nibble.QuantTensor], device: torch.device, dtype: torch.dtype, act_scheme: str, name: str,
    *others: str | None,
) -> None:  # fmt: skip
    """Packs what `read` returns into the parameter `name`, which may be new, and frees the others.

    Raises what reading and packing do, with the name of the layer. vLLM copies reloaded weights into the memory of the first ones, whose
    header has been read: Unsupported where it differs.
    """
    where = getattr(layer, "prefix", "") or type(layer).__name__
    try:
        if where.endswith("wo_a"):
            raise Unsupported("DeepSeek-V4 multiplies by the weight of wo_a itself, as vLLM's own kernels leave it")
        packed = _weights.pack(read(), device, dtype, act_scheme)
        header = _header(packed)
        if layer.__dict__.setdefault("_nibble_header", header) != header:
            raise Unsupported("the weight that is loaded anew has another static scale, limit or act-order than the first; restart vLLM with it")
    except nibble.Error as problem:
        raise type(problem)(f"{where}: {problem}; VLLM_DISABLED_KERNELS={type(kernel).__name__} leaves such layers to vLLM") from None
    parameter = nn.Parameter(packed, requires_grad=False)
    if getattr(layer, name, None) is None:
        layer.register_parameter(name, parameter)
    else:
        replace_parameter(layer, name, parameter)
    for other in others:
        if other is not None and getattr(layer, other, None) is not None:
            replace_parameter(layer, other, nn.Parameter(getattr(layer, other).data.new_empty(0), requires_grad=False))


def _supported() -> tuple[bool, str | None]:
    if envs.VLLM_BATCH_INVARIANT:
        return False, "nibble chooses kernels by the number of tokens, and VLLM_BATCH_INVARIANT is set"
    return True, None


def _answer(kernel: type, reason: str) -> tuple[bool, str | None]:
    """What can_implement() returns. vLLM says the reasons only where no kernel takes the layer."""
    if reason:
        _logger.info_once("%s leaves layers to vLLM: %s", kernel.__name__, reason)
    return not reason, reason or None


class NibbleLinearKernel(MPLinearKernel):
    """Weights of 2 to 8 bits in groups or per channel, with or without zero points: AWQ, GPTQ, compressed-tensors, Quark."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        act_order = getattr(c, "has_g_idx", False)  # not in versions of vLLM that refuse act-order themselves
        whole_k, k = c.full_weight_shape[0], c.partition_weight_shape[0]
        try:
            if not c.weight_type.is_integer() or c.weight_type.is_signed():
                raise Unsupported(f"weights of {c.weight_type}; nibble takes unsigned integers here")
            scheme = _weights.grouped_scheme(c.weight_type.size_bits, c.weight_type.bias, c.zero_points, c.group_size, k, whole_k)
            if act_order and k != whole_k:
                raise Unsupported(
                    f"act-order, of which this rank has {k} of {whole_k} input channels: its groups are spread over ranks; use "
                    "tensor_parallel_size=1, or quantize with desc_act=False"
                )
        except Unsupported as problem:
            return _answer(cls, str(problem))
        reason = _supported()[1] or _weights.refusal(scheme, k, c.act_type, cls._act_scheme(c), act_order=act_order, backend=_backend())
        return _answer(cls, reason)

    @staticmethod
    def _act_scheme(c: MPLinearLayerConfig) -> str:
        """int8 per token where vLLM's own kernel quantizes them, too: with AMX, unless VLLM_CPU_INT4_W4A8=0."""
        wanted = current_platform.is_cpu() and getattr(envs, "VLLM_CPU_INT4_W4A8", False) and nibble.doctor()["isa"] == "amx"
        fits = c.weight_type.size_bits == 4 and c.act_type == torch.bfloat16 and not getattr(c, "has_g_idx", False)
        return "s8r" if wanted and fits else ""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        c = self.config
        k, n = c.partition_weight_shape
        g_idx = getattr(self, "w_gidx_name", None) if getattr(c, "has_g_idx", False) else None
        weight, scale = (self._rows(getattr(layer, name)) for name in (self.w_q_name, self.w_s_name))
        zero_point = self._rows(getattr(layer, self.w_zp_name)) if c.zero_points and self.w_zp_name is not None else None
        group = -1 if c.group_size == k else c.group_size
        order = None if g_idx is None else getattr(layer, g_idx)
        read = functools.partial(
            _weights.grouped, weight, scale, zero_point, order, n=n, k=k, bits=c.weight_type.size_bits, group_size=group
        )
        others = self.w_s_name, self.w_zp_name, getattr(self, "w_gidx_name", None)
        _hold(self, layer, read, weight.device, c.act_type, self._act_scheme(c), self.w_q_name, *others)

    @staticmethod
    def _rows(parameter: Any) -> Tensor:
        """The parameter with a row for each output channel, or for each word of them."""
        return parameter.data if parameter.output_dim == 0 else parameter.data.T

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        c = self.config
        return torch.ops.nibble.linear(x, getattr(layer, self.w_q_name), c.partition_weight_shape[1], bias, "none", c.out_type)


class NibbleInt8LinearKernel(Int8ScaledMMLinearKernel):
    """int8 weights and activations, which have a scale per token, or a static one, and zero points or none."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _supported()

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        reason = _weights.refusal("s8c", 4096, torch.float16, cls._act_scheme(c), backend=_backend())  # c has neither sizes nor types
        return _answer(cls, reason)

    @staticmethod
    def _act_scheme(c: Int8ScaledMMLinearLayerConfig) -> str:
        return ("s8" if c.input_symmetric else "s8z") + ("t" if c.is_static_input_scheme else "r")

    def process_weights_after_loading(self, layer: Any) -> None:
        c = self.config
        weight, scale, input_scale, input_zero, _ = self._get_layer_params(layer)
        static = (input_scale, None if c.input_symmetric else input_zero) if c.is_static_input_scheme else None
        read = functools.partial(_weights.codes, weight, scale, widths=layer.logical_widths, static=static)
        # While vLLM loads, the default type is the model's.
        _hold(self, layer, read, weight.device, torch.get_default_dtype(), self._act_scheme(c), *self.layer_param_names[:2])

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = getattr(layer, self.layer_param_names[0])
        return torch.ops.nibble.linear(x, packed, sum(layer.logical_widths), bias, "none", None)


class NibbleFp8LinearKernel(FP8ScaledMMLinearKernel):
    """FP8 weights with a scale for all or per output channel, and activations with one per token or a static one."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _supported()

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        weight, activation = c.weight_quant_key, c.activation_quant_key
        group = weight.scale.group_shape
        per_tensor = group.is_per_tensor()
        if weight.dtype != torch.float8_e4m3fn or not (per_tensor or group.is_per_channel() or group.is_per_token()):  # a row of W
            return _answer(cls, f"weights are {weight}; nibble takes float8_e4m3fn per tensor or output channel here")
        act_scheme = cls._act_scheme(activation)
        if not act_scheme:
            return _answer(cls, f"activations are {activation}; nibble takes float8_e4m3fn per token, or per tensor with a static scale")
        reason = _weights.refusal("e4m3t" if per_tensor else "e4m3c", c.weight_shape[1], c.input_dtype, act_scheme, backend=_backend())
        return _answer(cls, reason)

    @staticmethod
    def _act_scheme(activation: Any) -> str:
        """ "" where nibble has none."""
        group = activation.scale.group_shape
        if activation.dtype != torch.float8_e4m3fn or not activation.symmetric:
            return ""
        if activation.scale.static:
            return "e4m3t" if group.is_per_tensor() else ""
        return "e4m3r" if group.is_per_token() else ""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        c = self.config
        weight, scale, input_scale, limit = self._get_layer_params(layer)
        act_scheme = self._act_scheme(c.activation_quant_key)
        static = None if input_scale is None or act_scheme != "e4m3t" else (input_scale, None)
        read = functools.partial(_weights.codes, weight.T, scale, static=static, limit=limit)
        names = [_OWN] if _is_read_by_vllm(layer) else self.layer_param_names[:2]
        _hold(self, layer, read, weight.device, c.input_dtype, act_scheme, *names)

    def apply_weights(self, layer: nn.Module, x: Any, bias: Tensor | None = None) -> Tensor:
        packed = getattr(layer, _OWN if _is_read_by_vllm(layer) else self.layer_param_names[0])
        return torch.ops.nibble.linear(x, packed, self.config.weight_shape[0], bias, "none", self.config.out_dtype)

    def apply_scaled_mm(
        self, *, A: Tensor, B: Tensor, out_dtype: torch.dtype, As: Tensor, Bs: Tensor, bias: Tensor | None, output_shape: list[int]
    ) -> Tensor:
        """The product of codes A [M,K], with their scales As, and the packed weight B, which has its own scales."""
        return torch.ops.nibble.scaled_linear(A, As.flatten(), None, B, output_shape[-1], bias, "none", out_dtype).view(output_shape)


class NibbleFp8BlockLinearKernel(MMLinearKernel[FP8ScaledMMLinearLayerConfig, FP8Params]):
    """FP8 weights with a scale for each block of 128×128, and activations with one for each 128 channels of a token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _supported()

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        weight, activation = config.weight_quant_key, config.activation_quant_key
        if weight.dtype != torch.float8_e4m3fn or min(weight.scale.group_shape) < 1:
            return _answer(cls, f"weights are {weight}; nibble takes float8_e4m3fn in blocks here")
        if activation.dtype != torch.float8_e4m3fn or activation.scale.static or not activation.scale.group_shape.is_per_group():
            return _answer(cls, f"activations are {activation}; nibble takes float8_e4m3fn in groups of channels, with scales found while running")
        scheme, act_scheme = cls._schemes(config)
        reason = _weights.refusal(scheme, config.weight_shape[1], config.input_dtype, act_scheme, backend=_backend())
        return _answer(cls, reason)

    @staticmethod
    def _schemes(config: FP8ScaledMMLinearLayerConfig) -> tuple[str, str]:
        n, k = config.weight_quant_key.scale.group_shape
        return f"e4m3b{n}x{k}", f"e4m3g{config.activation_quant_key.scale.group_shape[1]}"

    def _get_layer_params(self, layer: nn.Module, **kwargs: Any) -> FP8Params:
        scale = getattr(layer, self._scale_name(layer))
        return FP8Params(layer.weight, scale, getattr(layer, "input_scale", None), getattr(layer, "input_scale_ub", None))

    @staticmethod
    def _scale_name(layer: nn.Module) -> str:
        return "weight_scale" if getattr(layer, "weight_scale_inv", None) is None else "weight_scale_inv"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        params = self._get_layer_params(layer)
        read = functools.partial(_weights.blocks, params.weight, params.weight_scale, self.config.weight_quant_key.scale.group_shape)
        names = [_OWN] if _is_read_by_vllm(layer) else ["weight", self._scale_name(layer)]
        _hold(self, layer, read, params.weight.device, self.config.input_dtype, self._schemes(self.config)[1], *names)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        packed = getattr(layer, _OWN if _is_read_by_vllm(layer) else "weight")
        return torch.ops.nibble.linear(x, packed, self.config.weight_shape[0], bias, "none", self.config.out_dtype)


_KERNELS: tuple[tuple[str, type, str], ...] = (
    ("mp", NibbleLinearKernel, "_POSSIBLE_KERNELS"),
    ("int8", NibbleInt8LinearKernel, "_POSSIBLE_INT8_KERNELS"),
    ("fp8", NibbleFp8LinearKernel, "_POSSIBLE_FP8_KERNELS"),
    ("fp8_block", NibbleFp8BlockLinearKernel, "_POSSIBLE_FP8_BLOCK_KERNELS"),
)
"""The kinds of register_linear_kernel, and vLLM's lists of them, in the order in which it asks."""


def register(platform: PlatformEnum) -> None:
    """Registers the kernels, and moves them to the front, since vLLM appends."""
    # vLLM keeps compiled graphs under a hash of these variables: graphs with nibble's operator must not be taken without it, and the reverse.
    envs.environment_variables["NIBBLE_VLLM"] = lambda: nibble.__version__
    for kind, kernel, name in _KERNELS:
        kernels = getattr(linear, name, {})
        if kernel in kernels.get(platform, ()):
            continue
        try:
            register_linear_kernel(kernel, platform, kind)
        except ValueError:
            _logger.info_once("vLLM %s takes no kernels of the kind %s: %s is left out", vllm.__version__, kind, kernel.__name__)
            continue
        if kernel in kernels.get(platform, ()):
            kernels[platform].remove(kernel)
            kernels[platform].insert(0, kernel)
        else:
            _logger.warning("vLLM %s asks %s after its own kernels", vllm.__version__, kernel.__name__)
