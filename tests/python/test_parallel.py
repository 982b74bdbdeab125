"""Shares of a layer: alone, and with two processes over Gloo. Skipped without PyTorch."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from conftest import act_ordered, distance

import nibble

torch = pytest.importorskip("torch")
nt = pytest.importorskip("nibble.torch")


def layer(kind: str) -> nibble.QuantTensor:
    rng = np.random.default_rng(3)
    if kind == "act_order":
        return act_ordered(rng, n=64, k=256)
    q = nibble.quantize(rng.standard_normal((64, 256), dtype=np.float32), kind)
    return nibble.QuantTensor(**nibble._fields(q, bias=rng.standard_normal(64, dtype=np.float32)))


KINDS = ["act_order", "u4zg64", "u4b8g256", "s8c", "e4m3b64x256", "e4m3t"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_shares_put_together_are_the_layer(kind, parts):
    q = layer(kind)
    w = nibble.pack(q).dequantize()
    rows = [nt.shard_outputs(q, i * 64 // parts, (i + 1) * 64 // parts) for i in range(parts)]
    assert np.array_equal(np.concatenate([nibble.pack(r).dequantize() for r in rows]), w)
    assert np.array_equal(np.concatenate([r.bias for r in rows]), q.bias)
    assert len({r.scheme for r in rows}) == 1
    seen = []
    for i in range(parts):
        part, channels = nt.shard_inputs(q, i * 256 // parts, (i + 1) * 256 // parts)
        assert part.g_idx is None and np.array_equal(nibble.pack(part).dequantize(), w[:, channels])
        seen.extend(channels)
    assert sorted(seen) == list(range(256))


def test_bounds():
    with pytest.raises(nibble.InvalidArgument, match="64"):
        nt.shard_outputs(layer("s8c"), 32, 65)
    with pytest.raises(nibble.InvalidArgument, match="256"):
        nt.shard_inputs(layer("s8c"), 32, 32)


def rank_main(rank: int, port: int, gpus: bool) -> None:
    import torch.distributed as dist

    device = f"cuda:{rank}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x = torch.randn(5, 256).to(device)
    limit = 1e-5 if gpus else 1e-6
    for kind in KINDS[:4] if gpus else KINDS:  # a GPU multiplies FP8 weights by FP8 activations only
        q = layer(kind)
        whole = nt.QuantLinear(q, device=device)(x)
        gathered = nt.ColumnParallelLinear(q, gather_output=True, device=device)(x)
        assert distance(gathered.cpu(), whole.cpu()) < limit, kind
        row = nt.RowParallelLinear(q, device=device)
        assert distance(row(x).cpu(), whole.cpu()) < limit, kind
        shared = nt.RowParallelLinear(q, input_is_parallel=True, device=device)
        assert distance(shared(x[:, shared.channels]).cpu(), whole.cpu()) < limit, kind
    # Two layers without talking in between; the second decides which channels the first computes.
    first, second = layer("u4zg64"), act_ordered(np.random.default_rng(4), n=32, k=64, group=32)
    down = nt.RowParallelLinear(second, input_is_parallel=True, device=device)
    up = nt.ColumnParallelLinear(first, channels=down.channels, activation="silu", device=device)
    exact = nt.QuantLinear(second, device=device)(nt.QuantLinear(first, activation="silu", device=device)(x))
    assert distance(down(up(x)).cpu(), exact.cpu()) < 10 * limit
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("gpus", [False, True])
def test_two_processes(gpus):
    if gpus and (torch.cuda.device_count() < 2 or nibble.doctor()["gpu"] is None):
        pytest.skip("two GPUs, and a build with CUDA")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, args=(port, gpus), nprocs=2)
