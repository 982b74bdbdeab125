"""nibble for vLLM: linear layers of quantized checkpoints run on nibble's kernels, ahead of vLLM's own, on GPUs and CPUs.

vLLM finds this package by its entry point and calls register() in each of its processes. The layers that nibble refuses, and all else, stay
with vLLM. NIBBLE_VLLM=0 in the environment leaves vLLM as it is.
"""

from __future__ import annotations

import logging
import os

from nibble.errors import InvalidArgument

__all__ = ["register"]


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Puts nibble's kernels before vLLM's on CUDA and on the CPU, once; with NIBBLE_VLLM=0 it does nothing.

    A vLLM without register_linear_kernel, or one that cannot be imported, is warned of in vLLM's log and left as it is. Raises
    InvalidArgument for another value of NIBBLE_VLLM than 0 and 1.
    """
    value = os.environ.get("NIBBLE_VLLM", "1")
    if value not in ("0", "1"):
        raise InvalidArgument(f"NIBBLE_VLLM is {value!r}; write 1 for nibble's kernels in vLLM, 0 for vLLM's own")
    if value == "0":
        return
    try:
        from nibble.vllm import _kernels
    except ImportError as problem:
        logging.getLogger("vllm.nibble").warning("nibble's kernels are not used: %s", problem)
        return
    for platform in (_kernels.PlatformEnum.CUDA, _kernels.PlatformEnum.CPU):
        _kernels.register(platform)
