"""Packed weights as tensors of bytes."""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nibble
from nibble import _arrays, _core
from nibble.errors import InvalidArgument

_COMPUTED = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = {"cpu": 64, "cuda": 256}  # of packed bytes


def to_tensor(weight: nibble.PackedWeight) -> Tensor:
    """The weight as one tensor of bytes, uint8, where the weight is: PackedWeight.header() and after it the packed bytes.

    It can be copied, saved and sent like every tensor; it is equal for equal weights that were packed for the same layout.
    """
    header = np.frombuffer(weight.header(), np.uint8)
    with torch.inference_mode(False):  # other tensors have no versions
        if weight.backend == "cuda":
            packed = torch.empty(header.size + weight.nbytes, dtype=torch.uint8, device=weight.device[0] + f":{weight.device[1]}")
            packed[: header.size] = torch.tensor(header, device=packed.device)
            packed[header.size :] = torch.from_dlpack(weight.bytes)
            return packed
        packed = _host_bytes(header.size + weight.nbytes)
        packed.numpy()[: header.size] = header
        packed.numpy()[header.size :] = weight.bytes
        return packed


def _host_bytes(size: int) -> Tensor:
    """Like torch.empty; large ones ask for huge pages, with which a core misses fewer translations while it streams a weight."""
    if size < 1 << 21 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def from_tensor(packed: Tensor) -> TorchWeight:
    """The weight of a tensor that to_tensor() made, whose memory it reads and keeps; of a tensor that does not begin at a multiple of 64
    bytes (on a GPU 256), a copy.

    Raises CorruptData for other bytes, Unsupported for a layout that is not for the tensor's device.
    """
    return TorchWeight(packed, packed.new_empty(0, dtype=_usual_type(_weight(packed))))


class TorchWeight(nibble.PackedWeight):
    """The packed weight of a module, which has what models ask of the weight of a torch.nn.Linear: shape, dtype, device.

    dtype is the one the module computes in, as of the float weight it took the place of: `x.to(layer.weight.dtype)` is what such a layer
    would have been given.
    """

    shape: torch.Size  # type: ignore[assignment]
    device: torch.device  # type: ignore[assignment]

    def __init__(self, packed: Tensor, like: Tensor) -> None:
        super().__init__(_weight(packed)._weight)
        self._storage = packed.untyped_storage()  # whose memory is read
        self._packed, self._version, self._address = packed, _version(packed), packed.data_ptr()
        self.shape, self.dtype, self.device = torch.Size((self.n, self.k)), like.dtype, like.device

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """The layer's, [N]; None where it has none."""
        bias = self.unpack().bias if self.has_bias else None
        return None if bias is None else _to_torch(bias).to(self.device, self.dtype)


def _copied(packed: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return (_host_bytes(packed.numel()) if packed.device.type == "cpu" else torch.empty_like(packed)).copy_(packed)


def _placed(packed: Tensor, device: torch.device) -> Tensor:
    """The same weight where the device is, packed anew unless its layout is for there; itself where nothing is to be done."""
    if packed.is_meta or device.type == "meta":
        return packed.to(device)
    layouts = {layout.name: layout.backend for layout in nibble.layouts()}
    if layouts.get(_core.packed_layout(_header(packed))) == device.type:
        placed = packed.to(device)
        return placed if placed.data_ptr() % _ALIGNMENT[device.type] == 0 else _copied(placed)
    there = _copied(packed.cpu())  # kept: the weight reads its memory
    weight = _weight(there)
    return to_tensor(_pack(weight.unpack(), device, **nibble._spec(weight)))


def _header(packed: Tensor) -> bytes:
    if packed.dtype != torch.uint8 or packed.ndim != 1 or not packed.is_contiguous():
        raise InvalidArgument(f"a packed weight is a dense vector of torch.uint8, got {packed.dtype} of shape {tuple(packed.shape)}; see to_tensor")
    size = _core.packed_header_size(packed[: _core.packed_prefix].cpu().numpy().tobytes())
    return packed[:size].cpu().numpy().tobytes()


# By address: the storage, which is not kept; its version; and the weight that reads its memory.
_bound: dict[int, tuple[weakref.ref[Any], int, nibble.PackedWeight]] = {}


def _version(packed: Tensor) -> int:
    """Changes with the contents; those of an inference tensor are taken not to change."""
    try:
        return packed._version
    except RuntimeError:
        return -1


def _weight(packed: Tensor) -> nibble.PackedWeight:
    """The weight of a tensor, found once: by its address, and valid while its storage lives and is not written to."""
    address = packed.data_ptr()
    found = _bound.get(address)
    if found is not None:
        storage, version, weight = found
        if storage() is packed.untyped_storage() and version == _version(packed):
            return weight
    header = _header(packed)
    on_gpu = packed.is_cuda
    aligned = address % _ALIGNMENT[packed.device.type] == 0
    bytes_ = (packed if aligned else _copied(packed))[len(header) :]  # archives may hold tensors anywhere: the weight keeps a copy then
    with torch.cuda.device(packed.device) if on_gpu else contextlib.nullcontext():
        core = _core.PackedWeight.from_bytes(header, _arrays.export(bytes_), gpu=on_gpu, keep=not aligned)

    def forget(storage: Any) -> None:
        if (entry := _bound.get(address)) is not None and entry[0] is storage:
            del _bound[address]

    weight = nibble.PackedWeight(core)
    _bound[address] = weakref.ref(packed.untyped_storage(), forget), _version(packed), weight
    return weight


def _checked(packed: Tensor, n: int) -> nibble.PackedWeight:
    weight = _weight(packed)
    if weight.n != n:
        raise InvalidArgument(f"n={n}, but the weight is W[{weight.n},{weight.k}]")
    return weight


def _usual_type(weight: nibble.PackedWeight | nibble.QuantTensor) -> torch.dtype:
    """That of the scales, or of a dense weight."""
    if isinstance(weight, nibble.QuantTensor):
        return _to_torch((weight.codes if weight.scales is None else weight.scales)[:0]).dtype
    return getattr(torch, _arrays.NAMES[weight.scheme if weight.scale == "none" else weight.scale])


def _pack(q: nibble.QuantTensor, device: torch.device, **spec: Any) -> nibble.PackedWeight:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return nibble.pack(q, backend="cuda", **spec)
    return nibble.pack(q, **spec)


def _to_torch(array: np.ndarray) -> Tensor:
    """A copy; NumPy's bf16 and FP8 as torch's."""
    name = {"uint16": "bfloat16"}.get(array.dtype.name, array.dtype.name)
    bits = {2: np.int16, 1: np.uint8}.get(array.dtype.itemsize, array.dtype) if name.startswith(("bfloat", "float8")) else array.dtype
    return torch.from_numpy(array.view(bits).copy()).view(getattr(torch, name))
