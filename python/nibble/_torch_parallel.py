"""Shares of layers for several processes; nibble.torch has what is public."""

from __future__ import annotations

import math
import re
from typing import Any, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import nibble
from nibble.errors import InvalidArgument, NotFound, Unsupported
from nibble.torch import QuantLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "shard_inputs", "shard_outputs"]


def _replace(q: nibble.QuantTensor, **fields: Any) -> nibble.QuantTensor:
    return nibble.QuantTensor(**nibble._fields(q, **fields))


def _regrouped(scheme: str, n: int, k: int) -> str:
    """The scheme with another group shape: "u4zg128" → "u4zg64"."""
    stem = re.sub(r"(g\d+|b\d+x\d+)$", "", scheme)
    return f"{stem}g{k}" if n == 1 else f"{stem}b{n}x{k}"


def _common(group: int, begin: int, end: int, total: int) -> int:
    """The largest groups that lie within a group each and begin where the part does; the same for all parts of one size."""
    return group if end - begin == total else math.gcd(group, begin, end - begin)


def shard_outputs(q: nibble.QuantTensor, begin: int, end: int) -> nibble.QuantTensor:
    """The layer with the output channels [begin, end) alone. A boundary inside a block of output channels makes blocks smaller."""
    if not 0 <= begin < end <= q.n:
        raise InvalidArgument(f"output channels [{begin}, {end}) of {q.n}")
    n, k = q.group_shape
    fields: dict[str, Any] = {"codes": q.codes[begin:end]}
    if n != 0:
        smaller = _common(n, begin, end, q.n)
        rows = np.arange(begin, end, smaller) // n
        fields.update(scales=q.scales[rows], zeros=None if q.zeros is None else q.zeros[rows])
        if smaller != n:
            fields["scheme"] = _regrouped(q.scheme, smaller, k or q.k)
    if q.bias is not None:
        fields["bias"] = q.bias[begin:end]
    return _replace(q, **fields)


def shard_inputs(q: nibble.QuantTensor, begin: int, end: int) -> tuple[nibble.QuantTensor, np.ndarray]:
    """The layer with a part of its input channels, and which ones: channels [begin, end) in the order of their groups.

    Without act-order these are begin … end-1. With it they are those of whole groups, in order, so that the part has no g_idx. A boundary
    inside a group makes groups smaller. The bias stays; the sum of all parts' results has it once per part.
    """
    if not 0 <= begin < end <= q.k:
        raise InvalidArgument(f"input channels [{begin}, {end}) of {q.k}")
    order = np.arange(q.k) if q.g_idx is None else np.argsort(q.g_idx, kind="stable")
    channels = order[begin:end]
    n, k = q.group_shape
    fields: dict[str, Any] = {"codes": np.ascontiguousarray(q.codes[:, channels]), "g_idx": None}
    if k != 0:
        smaller = _common(k, begin, end, q.k)
        groups = np.arange(begin, end, smaller) // k
        fields.update(scales=q.scales[:, groups], zeros=None if q.zeros is None else q.zeros[:, groups])
        if smaller != k:
            fields["scheme"] = _regrouped(q.scheme, n or q.n, smaller)
    if q.prescale is not None:
        fields["prescale"] = q.prescale[channels]
    return _replace(q, **fields), channels


def _read_part(cls: Any, checkpoint: nibble.Checkpoint, name: str, which: str, group: Any, options: dict[str, Any]) -> Any:
    """The rank's layer from its own bytes of the file, or from all of them where these are not apart."""
    layer = next((module for module in checkpoint.modules if module.name == name), None)
    if layer is None:
        raise NotFound(f"{checkpoint.path}: no module {name}")
    total, what = (layer.n, "N") if which == "outputs" else (layer.k, "K")
    try:
        share = checkpoint.read(layer, **{which: _part(total, what, group)})
    except Unsupported:
        return cls(checkpoint.read(layer), group=group, **options)
    return cls(share, is_share=True, group=group, **options)


def _part(total: int, what: str, group: Any) -> tuple[int, int]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if total % ranks != 0:
        raise InvalidArgument(f"{what}={total} does not divide among {ranks} ranks")
    return rank * (total // ranks), (rank + 1) * (total // ranks)


class ColumnParallelLinear(QuantLinear):
    """A rank's share of the output channels of a layer: y[..., N / ranks] = x · Wᵀ + bias; with gather_output all of y, on every rank.

    q: the whole layer; with is_share this rank's output channels alone, as engines load them. channels: which output channels this rank
    computes, where the next layer wants others than its N / ranks consecutive ones (RowParallelLinear.channels of an act-order layer).
    """

    def __init__(
        self, q: nibble.QuantTensor, *, channels: Iterable[int] | None = None, gather_output: bool = False, is_share: bool = False,
        group: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        if is_share:
            if channels is not None:
                raise InvalidArgument("channels= picks from a whole layer; q is a share")
        elif channels is not None:
            _part(q.n, "N", group)
            if gather_output:
                raise InvalidArgument("gather_output puts consecutive channels together; it takes no channels=")
            if q.group_shape[0] != 1:
                raise InvalidArgument(f"{q.scheme}: output channels share scales, and cannot be picked one by one")
            chosen = np.asarray(list(channels), dtype=np.int64)
            rows = {name: None if getattr(q, name) is None else getattr(q, name)[chosen] for name in ("codes", "scales", "zeros", "bias")}
            q = _replace(q, **rows)
        else:
            q = shard_outputs(q, *_part(q.n, "N", group))
        super().__init__(q, **options)
        self.gather_output, self.group = gather_output, group

    @classmethod
    def read(cls, checkpoint: nibble.Checkpoint, name: str, *, group: Any = None, **options: Any) -> ColumnParallelLinear:
        """Of a layer of a checkpoint, whose other output channels are not read where the file has them apart."""
        return _read_part(cls, checkpoint, name, "outputs", group, options)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.gather_output:
            return y
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, y.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class RowParallelLinear(QuantLinear):
    """A rank's share of the input channels of a layer; y[..., N] is the sum over all ranks, and the same on each.

    q: the whole layer; with is_share this rank's input channels alone, consecutive ones, with the whole bias.
    input_is_parallel: x is this rank's share already, x_whole[..., self.channels]; else x is whole and the share is taken from it.
    Without act-order the channels are consecutive, as a ColumnParallelLinear in front leaves them. With act-order they are those of
    whole groups: give the layer in front channels=self.channels. Activations quantized while running are so from this rank's share.
    """

    channels: Tensor

    def __init__(
        self, q: nibble.QuantTensor, *, input_is_parallel: bool = False, is_share: bool = False, group: Any = None, **options: Any
    ) -> None:
        if is_share:
            part, channels = q, np.arange(q.k) + dist.get_rank(group) * q.k
        else:
            part, channels = shard_inputs(q, *_part(q.k, "K", group))
        if dist.get_rank(group) != 0 and part.bias is not None:
            part = _replace(part, bias=None)
        if options.get("activation", "none") != "none":
            raise InvalidArgument("an activation comes after the sum over all ranks; apply it to the result")
        super().__init__(part, **options)
        self.register_buffer("channels", torch.from_numpy(np.array(channels)), persistent=False)
        self.input_is_parallel, self.group = input_is_parallel, group

    @classmethod
    def read(cls, checkpoint: nibble.Checkpoint, name: str, *, group: Any = None, **options: Any) -> RowParallelLinear:
        """Of a layer of a checkpoint, whose other input channels are not read where the file has them apart: not in act-order, nor where a
        boundary is inside a group."""
        return _read_part(cls, checkpoint, name, "inputs", group, options)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = x[..., self.channels]
        y = super().forward(x)
        dist.all_reduce(y, group=self.group)
        return y

# Where pickles find them: this module cannot be the first that is imported.
for _public in (ColumnParallelLinear, RowParallelLinear, shard_outputs, shard_inputs):
    _public.__module__ = "nibble.torch"
