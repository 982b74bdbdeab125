"""Arrays of each framework: how to read them in place, and how to return results of the same kind.

Nothing here imports a framework that the caller has not imported: an array's type names its framework.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, ContextManager

from .errors import InvalidArgument, Unsupported

# nibble's names of element types, by the frameworks' names.
_TOKENS = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e8m0fnu": "e8m0",
    "int8": "s8", "int16": "s16", "int32": "s32", "int64": "s64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "bool",
}  # fmt: skip
NAMES = {token: name for name, token in _TOKENS.items()}
_BITS = {"bf16": "uint16", "e4m3": "uint8", "e5m2": "uint8", "e8m0": "uint8"}  # what NumPy has instead

CPU = ("cpu", 0)


@functools.lru_cache(maxsize=None)
def token(dtype: Any) -> str:
    """nibble's name of a dtype: "f16", np.float16, torch.float16, "float16" → "f16". Raises InvalidArgument."""
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = getattr(dtype, "__name__", "")
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    name = name.rpartition(".")[2]
    if name in NAMES:
        return name
    if name not in _TOKENS:
        raise InvalidArgument(f"{dtype!r} is no element type nibble knows; write f32, f16, bf16, s8, u8 or e4m3")
    return _TOKENS[name]


@functools.lru_cache(maxsize=None)
def _numpy_type(token_: str) -> Any:
    import numpy

    if token_ not in _BITS:
        return numpy.dtype(NAMES[token_])
    try:
        import ml_dtypes
    except ImportError:
        return numpy.dtype(_BITS[token_])
    return numpy.dtype(getattr(ml_dtypes, NAMES[token_]))


def named(bits: Any, token_: str) -> Any:
    """uint16 or uint8 bits as the type they are, where ml_dtypes is installed; without it, the bits. Called by the extension."""
    return bits.view(_numpy_type(token_))


class Numpy:
    """The base of all: arrays in host memory, results are NumPy's."""

    def table(self, kind: type) -> Any:
        """DLPack's C functions for arrays of this type, as a capsule; None where they come by `__dlpack__` or the buffer protocol."""
        return vars(kind).get("__dlpack_c_exchange_api__")

    def device(self, x: Any) -> tuple[str, int]:
        """ "cpu" or "cuda", and which."""
        if type(x).__module__ == "numpy":
            return CPU
        where = getattr(x, "__dlpack_device__", None)
        if where is None:
            return CPU
        kind, index = where()
        return ("cuda", int(index)) if int(kind) == 2 else CPU

    def export(self, x: Any, stream: int | None) -> Any:
        """What the extension opens: the array, or a DLPack capsule whose memory is ready for `stream`."""
        if self.device(x)[0] == "cpu":
            return x
        wanted = stream or 1  # DLPack's name of CUDA's default stream
        try:
            return x.__dlpack__(stream=wanted, max_version=(1, 1))
        except TypeError:  # a producer from before versions
            return x.__dlpack__(stream=wanted)

    def contiguous(self, x: Any) -> Any:
        """A copy without gaps, in the order of its dimensions."""
        import numpy

        return numpy.ascontiguousarray(x)

    def check_writable(self, x: Any) -> None:
        """Raises InvalidArgument where DLPack would let us write and the framework would not."""

    def empty(self, shape: tuple[int, ...], token_: str, like: Any, stream: int | None) -> Any:
        """New memory where `like` is, of its kind. stream: to which it belongs, None for the current one."""
        if like is not None and self.device(like)[0] == "cuda":
            raise Unsupported(f"nibble cannot make arrays of {type(like).__qualname__} in device memory; pass out=")
        import numpy

        dtype = _numpy_type(token_)
        if token_ in _BITS and getattr(like, "dtype", None) == _BITS[token_]:
            dtype = numpy.dtype(_BITS[token_])  # bits are answered with bits
        return numpy.empty(shape, dtype)

    def channels_second(self, images: Any) -> Any:
        """[B,H,W,C] seen as [B,C,H,W]."""
        return images.transpose(0, 3, 1, 2)

    def finish(self, array: Any) -> Any:
        """A result as the caller gets it."""
        return array

    def current_stream(self, x: Any) -> int:
        """The cudaStream_t that work on x is ordered by; 0 is CUDA's default stream."""
        return 0

    def on_device(self, x: Any) -> ContextManager[Any] | None:
        """Makes the GPU of x the current one; None where it is."""
        return None


@functools.lru_cache(maxsize=None)
def _torch_type(token_: str) -> Any:
    return getattr(sys.modules["torch"], NAMES[token_])


class Torch(Numpy):
    def table(self, kind: type) -> Any:
        plain = getattr(kind, "__torch_dispatch__", None) is sys.modules["torch"].Tensor.__torch_dispatch__
        return getattr(kind, "__dlpack_c_exchange_api__", None) if plain else None  # others may have no memory of their own

    def device(self, x: Any) -> tuple[str, int]:
        if x.is_cpu:
            return CPU
        device = x.device
        if device.type != "cuda":
            raise Unsupported(f"the tensor is on {device}; nibble has cpu and cuda")
        return "cuda", device.index

    def channels_second(self, images: Any) -> Any:
        return images.permute(0, 3, 1, 2)

    def contiguous(self, x: Any) -> Any:
        return x.detach().contiguous()

    def export(self, x: Any, stream: int | None) -> Any:
        if x.requires_grad:
            x = x.detach()
        return x if not x.is_cuda else super().export(x, stream)

    def empty(self, shape: tuple[int, ...], token_: str, like: Any, stream: int | None) -> Any:
        dtype = _torch_type(token_)
        if stream is not None:
            torch = sys.modules["torch"]
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device)):  # so that it is not reused too early
                return like.new_empty(shape, dtype=dtype)
        return like.new_empty(shape, dtype=dtype)

    def current_stream(self, x: Any) -> int:
        return sys.modules["torch"].cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0

    def on_device(self, x: Any) -> ContextManager[Any] | None:
        cuda = sys.modules["torch"].cuda
        return None if cuda.current_device() == x.get_device() else cuda.device(x.device)


class Cupy(Numpy):
    def device(self, x: Any) -> tuple[str, int]:
        return "cuda", x.device.id

    def contiguous(self, x: Any) -> Any:
        return sys.modules["cupy"].ascontiguousarray(x)

    def empty(self, shape: tuple[int, ...], token_: str, like: Any, stream: int | None) -> Any:
        cupy = sys.modules["cupy"]
        context = cupy.cuda.ExternalStream(stream) if stream else contextlib.nullcontext()
        with context:
            return cupy.empty(shape, _BITS.get(token_, NAMES[token_]))

    def current_stream(self, x: Any) -> int:
        return sys.modules["cupy"].cuda.get_current_stream().ptr

    def on_device(self, x: Any) -> ContextManager[Any] | None:
        return x.device


class Jax(Numpy):
    """Arrays are immutable: results are made by NumPy and handed over. Nothing is lost, JAX takes aligned memory as it is."""

    def table(self, kind: type) -> Any:
        return None  # what is not computed yet has to be waited for, as __dlpack__ does

    def check_writable(self, x: Any) -> None:
        raise InvalidArgument("results cannot be written to a JAX array, which is immutable; take the one returned")

    def finish(self, array: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(array)


NUMPY = Numpy()
_FRAMEWORKS: dict[str, Numpy] = {"torch": Torch(), "cupy": Cupy(), "jax": Jax(), "jaxlib": Jax()}


def framework(x: Any) -> Numpy:
    kind: Any = type(x)
    return _framework_of(kind)


@functools.lru_cache(maxsize=None)
def _framework_of(kind: type) -> Numpy:
    """By the type, or a type it derives from: torch.nn.Parameter and other people's subclasses are torch's."""
    for base in kind.__mro__:
        found = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return NUMPY


def known(kind: Any) -> tuple[Numpy, Any, bool]:
    """What the extension has to know of a type of arrays: its framework, the table, and whether they are NumPy's own."""
    found = _framework_of(kind)
    return found, found.table(kind), kind.__module__ == "numpy"


def export(x: Any, stream: int | None = None) -> Any:
    return None if x is None else framework(x).export(x, stream)


def channels_last(x: Any) -> bool:
    """Whether a tensor of images [B,C,H,W] lies as NHWC. Where both would do, as of one channel, it is NCHW."""
    (_, c, h, w), strides = x.shape, x.stride()
    apart = strides[3] if w > 1 else strides[2] if h > 1 else 1  # the pixels of a channel
    return apart != 1 and (c == 1 or strides[1] == 1)


def stream_handle(stream: Any) -> int:
    """A cudaStream_t from an integer or from a stream of torch or CuPy."""
    for attribute in ("cuda_stream", "ptr", "handle"):
        stream = getattr(stream, attribute, stream)
    return int(stream)
