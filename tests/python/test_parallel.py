"""Shares of a layer: alone, and with one, two and four processes over Gloo, or two over NCCL. Skipped without PyTorch."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

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


def written(directory: pathlib.Path) -> pathlib.Path:
    """A checkpoint of two layers."""
    torch.manual_seed(5)
    state = {"up.weight": torch.randn(512, 256), "down.weight": torch.randn(256, 512)}
    save_file({name: tensor.half() for name, tensor in state.items()}, directory / "model.safetensors")
    nibble.quantize_checkpoint(directory, directory.parent / "quantized", scheme="u4zg128", format="awq")
    return directory.parent / "quantized"


def save_file(tensors, path):
    """safetensors, without the package of that name."""
    import json

    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_shares_of_a_file(tmp_path):
    (tmp_path / "float").mkdir()
    checkpoint = nibble.open(written(tmp_path / "float"))
    whole = checkpoint.read("up")
    for begin, end in ((0, 128), (128, 512)):
        part = checkpoint.read("up", outputs=(begin, end))
        assert (part.n, part.k) == (end - begin, 256) and np.array_equal(part.codes, whole.codes[begin:end])
    part = checkpoint.read("down", inputs=(128, 384))
    assert np.array_equal(nibble.pack(part).dequantize(), nibble.pack(checkpoint.read("down")).dequantize()[:, 128:384])
    with pytest.raises(nibble.Unsupported, match="groups of 128"):
        checkpoint.read("down", inputs=(0, 64))
    with pytest.raises(nibble.InvalidArgument, match="512"):
        checkpoint.read("up", outputs=(0, 513))
    with pytest.raises(nibble.InvalidArgument, match="not both"):
        checkpoint.read("up", outputs=(0, 8), inputs=(0, 128))


def rank_main(rank: int, port: int, gpus: bool, ranks: int, path: str) -> None:
    import torch.distributed as dist

    device = f"cuda:{rank}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
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
    # From a file: each rank its own bytes; with eight ranks boundaries are inside groups, and every rank reads all.
    checkpoint = nibble.open(path)
    up = nt.ColumnParallelLinear.read(checkpoint, "up", activation="silu", device=device)
    down = nt.RowParallelLinear.read(checkpoint, "down", input_is_parallel=True, device=device)
    assert (up.out_features, down.in_features) == (512 // ranks, 512 // ranks)
    assert down.channels.tolist() == list(range(rank * 512 // ranks, (rank + 1) * 512 // ranks))
    exact = nt.QuantLinear(checkpoint.read("down"), device=device)(nt.QuantLinear(checkpoint.read("up"), activation="silu", device=device)(x))
    assert distance(down(up(x)).cpu(), exact.cpu()) < 10 * limit
    with pytest.raises(nibble.NotFound, match="no module gate"):
        nt.ColumnParallelLinear.read(checkpoint, "gate")
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("ranks, gpus", [(1, False), (2, False), (4, False), (8, False), (2, True)])
def test_processes(ranks, gpus, tmp_path):
    if gpus and (torch.cuda.device_count() < 2 or nibble.doctor()["gpu"] is None):
        pytest.skip("two GPUs, and a build with CUDA")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (tmp_path / "float").mkdir()
    torch.multiprocessing.spawn(rank_main, args=(port, gpus, ranks, str(written(tmp_path / "float"))), nprocs=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_benchmark_checks_itself(ranks):
    program = pathlib.Path(__file__).parents[2] / "bench/parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), program, "--device", "cpu", "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of its bound") == 4
