"""bench/cpu_peers.py measures nibble beside whatever of the other libraries is here, and its result becomes a table."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("render")


def test_measures_and_renders(tmp_path, render):
    shapes, output = tmp_path / "shapes.txt", tmp_path / "peers.json"
    shapes.write_text("64 256 small\n")
    command = [sys.executable, str(ROOT / "bench/cpu_peers.py"), "--shapes", str(shapes), "--modes", "u4zg128,u4b8g128 × bf16,s8r_s8c", "-M", "1,3",
               "--rounds", "1", "--seconds", "0.001", "--json", str(output)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    data = json.loads(output.read_text())
    assert [(r["mode"], r["m"]) for r in data["results"]] == [(mode, m) for mode in ("u4zg128", "u4b8g128 × bf16", "s8r_s8c") for m in (1, 3)]
    torch = importlib.util.find_spec("torch") is not None
    for r in data["results"]:
        if "bf16" in r["mode"] and not torch:  # whose tensors bf16 is
            continue
        assert r["us"]["nibble"] > 0 and r["error"]["nibble"] < 0.02, r
        if torch and r["mode"] != "u4zg128":  # which it has not
            assert r["us"].get("torch", 0) > 0 or "avx512" not in data["device"]["isa"], r
        for name in data["versions"]:
            assert (name in r["us"]) != (name in r["left_out"]), r
    if torch:
        table = render.cpu_peers(data).splitlines()
        assert table[0] == "| mode | M = 1 | M = 3 |" and "torch" in table[3], table


def test_refuses_a_mode_that_is_not_there():
    command = [sys.executable, str(ROOT / "bench/cpu_peers.py"), "--modes", "u3g1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "no mode u3g1; there are u4b8g32" in done.stderr
