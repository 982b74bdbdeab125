"""Experts that are divided among two and four processes over Gloo, or two over NCCL, against one process that has all. Skipped without PyTorch."""

from __future__ import annotations

import platform
import socket

import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
nt = pytest.importorskip("nibble.torch")

E, K, I, N, TOP = 8, 64, 32, 48, 3
SCHEMES = ["u4zg32", "u4b8g32", "s8r_s8c"]


def layer(scheme: str, device: str, **limits: float) -> nt.QuantExperts:
    torch.manual_seed(1)
    act_scheme, scheme = nt._parts(scheme)

    def quantized(n: int, k: int):
        for _ in range(E):
            yield nibble.QuantTensor(**nibble._fields(nibble.quantize(torch.randn(n, k).numpy(), scheme), bias=torch.randn(n).numpy()))

    backend = {"backend": "cuda"} if device.startswith("cuda") else {}
    gate_up = nibble.pack_experts(quantized(2 * I, K), act_scheme=act_scheme, glu=True, **limits, **backend)
    return nt.QuantExperts(gate_up, nibble.pack_experts(quantized(N, I), act_scheme=act_scheme, **backend), "quick_gelu" if limits else "silu")


def tokens(count: int, dtype: torch.dtype, device: str):
    """x, ids and weights: tokens with -1 among their ids, and all with expert 1 in some place."""
    torch.manual_seed(2)
    others = torch.stack([torch.randperm(E - 1)[: TOP - 1] for _ in range(count)]) if count else torch.empty(0, TOP - 1, dtype=torch.int64)
    ids = torch.cat([torch.ones(count, 1, dtype=torch.int64), others + (others >= 1)], 1).roll(1, 1)
    ids[::5, 0] = -1
    return [t.to(device) for t in (torch.randn(count, K).to(dtype), ids, torch.rand(count, TOP))]


def check(y, wanted, gpus: bool) -> None:
    """The same bits, where the compiler does not join multiplications and additions of the sum, and where the same kernels run."""
    if not gpus and platform.machine() in ("x86_64", "AMD64"):
        assert torch.equal(y, wanted)
    else:
        assert distance(y.float().cpu(), wanted.float().cpu()) < (1e-2 if y.dtype == torch.bfloat16 else 1e-4)


def rank_main(rank: int, port: int, gpus: bool, ranks: int) -> None:
    import torch.distributed as dist

    device = f"cuda:{rank}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for scheme in SCHEMES:
        whole = layer(scheme, device, **({"glu_limit": 7.0, "glu_offset": 1.0} if scheme == "u4b8g32" else {}))
        own = nt._torch_parallel._experts
        experts = nt.ParallelExperts(own(whole.gate_up), own(whole.down), whole.activation)
        assert experts.num_experts == E and experts.gate_up.shape[0] == E // ranks and list(nt.ParallelExperts.share(E))[0] == rank * E // ranks
        assert torch.equal(experts.gate_up, whole.gate_up[rank * E // ranks : (rank + 1) * E // ranks])
        for dtype in (torch.float32, torch.bfloat16):
            for each in (0, 1, 23):  # tokens of the last rank: the first has none
                sizes = [each * r for r in range(ranks)]
                x, ids, weights = tokens(sum(sizes), dtype, device)
                wanted = whole(x, ids, weights)
                mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                y = experts(x[mine], ids[mine], weights[mine])
                assert y.dtype == dtype and y.shape == (sizes[rank], N)
                check(y, wanted[mine], gpus)
    # The same tokens everywhere, as in a model whose other layers are not divided: 7 do not divide among the ranks.
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"experts": whole}), "b": torch.nn.ModuleDict({"experts": whole})})
    assert nt.shard_experts(model, replicated=True) == ["a.experts"]
    assert type(model["a"]["experts"]) is nt.ParallelExperts and model["b"]["experts"] is model["a"]["experts"]
    for count in (7, 1, 0):
        x, ids, weights = tokens(count, torch.bfloat16, device)
        check(model["a"]["experts"](x.unsqueeze(0), ids.unsqueeze(0), weights.unsqueeze(0)), whole(x, ids, weights).unsqueeze(0), gpus)
    # A share that was packed alone.
    gate_ups, downs = ([weight.unpack() for weight in own(packed)] for packed in (whole.gate_up, whole.down))
    x, ids, weights = tokens(4, torch.float32, device)
    if not gpus:
        # docs: begin share
        share = nt.ParallelExperts.share(len(gate_ups))  # of 8 experts and 4 ranks, rank 1 has 2 and 3
        gate_up = nibble.pack_experts((gate_ups[e] for e in share), act_scheme="s8r", glu=True)
        down = nibble.pack_experts((downs[e] for e in share), act_scheme="s8r")
        experts = nt.ParallelExperts(gate_up, down, is_share=True)
        y = experts(x, ids, weights)  # of this rank's tokens, whose experts are anywhere
        # docs: end share
        check(y, whole(x, ids, weights), gpus)
    with pytest.raises(nibble.InvalidArgument, match=f"E=9 does not divide among {ranks} ranks"):
        nt.ParallelExperts.share(9)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("ranks, gpus", [(2, False), (4, False), (2, True)])
def test_processes(ranks, gpus):
    if gpus and (torch.cuda.device_count() < 2 or nibble.doctor()["gpu"] is None):
        pytest.skip("two GPUs, and a build with CUDA")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, args=(port, gpus, ranks), nprocs=ranks)
