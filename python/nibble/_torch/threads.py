"""The threads that loops on the CPU run on."""

from __future__ import annotations

import ctypes
import os

import torch

from nibble import _core


def share() -> None:
    """From here on nibble's loops run on the threads of PyTorch's operators, as many as torch.set_num_threads() says: those spin behind each
    operator, and would slow down others. NIBBLE_NUM_THREADS asks for threads of nibble's own."""
    if os.environ.get("NIBBLE_NUM_THREADS") or not torch.backends.openmp.is_available():
        return
    for place in (None, torch._C.__file__):  # as PyTorch's own calls are bound: first what was preloaded, then what it is linked with
        try:
            library = ctypes.CDLL(place)
            parallel, max_threads = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in ("GOMP_parallel", "omp_get_max_threads"))
            break
        except (OSError, AttributeError):
            continue
    else:  # another kind of OpenMP
        return
    torch.get_num_threads()  # PyTorch sets the number with its first operator
    _core.share_openmp(parallel, max_threads)
