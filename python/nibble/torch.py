"""nibble for PyTorch: operators that torch.compile understands, a module, and a pass that converts a model in place.

    import nibble.torch
    nibble.torch.convert(model, "u4b8g128")          # float layers are quantized; AWQ, GPTQ, ... layers keep their numbers
    nibble.torch.fuse(model)                         # the layers of decoder blocks are joined, with norms, products and additions

A packed weight is a tensor of bytes (`to_tensor`), which modules hold as a buffer and operators take, with the sizes of the result:

    torch.ops.nibble.linear(x, weight, n, bias, activation, out_dtype) -> y[..., N]
    torch.ops.nibble.fused_linear(x, weight, n, activation, glu, residual, norm, eps, norm_offset, next) -> y[..., N], of a glu N/2
    torch.ops.nibble.scaled_linear(codes, a_scale, a_zero, weight, n, bias, activation, out_dtype) -> y[..., N]
    torch.ops.nibble.conv2d(x, weight, n, filter, stride, padding, dilation, groups, bias, activation, out_dtype) -> y[B, Co, Oh, Ow]
    torch.ops.nibble.dequantize(weight, n, k, dtype) -> W[N, K]
    torch.ops.nibble.quantize_activations(x, scheme) -> (codes, scales, zeros)
    torch.ops.nibble.moe(x, ids, weights, gate_up, down, n, activation) -> y[..., N]
"""

from __future__ import annotations

from nibble._torch import threads
from nibble._torch.convert import Converted, convert, read_module
from nibble._torch.experts import QuantExperts
from nibble._torch.fuse import Fused, _Columns, _empty_block, fuse, unfuse
from nibble._torch.layers import FusedLinear, QuantConv2d, QuantLinear
from nibble._torch.operators import quantize_activations
from nibble._torch.parallel import ColumnParallelLinear, ParallelExperts, RowParallelLinear, shard_experts
from nibble._torch.shards import shard_inputs, shard_outputs
from nibble._torch.shared import _Among, split_mlp
from nibble._torch.weights import TorchWeight, from_tensor, to_tensor

__all__ = [
    "ColumnParallelLinear", "Converted", "Fused", "FusedLinear", "ParallelExperts", "QuantConv2d", "QuantExperts", "QuantLinear",
    "RowParallelLinear", "TorchWeight", "convert", "from_tensor", "fuse", "quantize_activations", "read_module", "shard_experts", "shard_inputs",
    "shard_outputs", "split_mlp", "to_tensor", "unfuse",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


threads.share()

# Where documentation and pickles find them, those of converted and fused models among them.
for _name in (*__all__, "_Among", "_Columns", "_empty_block"):
    globals()[_name].__module__ = __name__
