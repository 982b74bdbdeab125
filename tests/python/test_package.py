"""The package around the code: metadata, stubs, and what an import brings in."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import nibble

PACKAGE = pathlib.Path(nibble.__file__).parent


def test_metadata():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["name"] == "nibble" and project["project"]["dependencies"] == ["numpy"]
    version = project["tool"]["scikit-build"]["metadata"]["version"]
    assert re.search(version["regex"], (ROOT / version["input"]).read_text())["value"] == nibble.__version__
    for package in project["tool"]["scikit-build"]["wheel"]["packages"]:
        assert (ROOT / package / "__init__.py").exists()
    assert (ROOT / project["project"]["readme"]).exists()
    options = project["tool"]["scikit-build"]["cmake"]["define"]
    off = {name for name, value in options.items() if value == "OFF"}
    assert off >= {"NIBBLE_BUILD_TOOLS", "NIBBLE_BUILD_TESTS", "NIBBLE_BUILD_SHARED", "NIBBLE_INSTALL"}  # a wheel has none of them
    assert all(target.startswith("nibble-python") for target in project["tool"]["scikit-build"]["build"]["targets"])


def test_types_are_shipped():
    stub = (PACKAGE / "_core.pyi").read_text()
    assert (PACKAGE / "py.typed").exists()
    for name in ("QuantTensor", "Checkpoint", "PackedWeight", "VerifyReport"):
        assert f"class {name}:" in stub
    assert all(hasattr(nibble, name) for name in nibble.__all__)


def test_nothing_private_is_shown():
    code = "import nibble, sys; print(*dir(nibble)); import nibble.torch; print(*dir(nibble)); print(*dir(nibble.torch))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, *more = (set(line.split()) for line in done.stdout.splitlines())
    assert first == set(nibble.__all__) and not [name for name in first if name.startswith("_") and name != "__version__"]
    if more:  # there is PyTorch
        assert more[0] == first | {"torch"} and "convert" in more[1] and not more[1] & {"np", "nn", "re", "Tensor", "_SKIP"}


def test_an_import_brings_no_framework():
    check = "import sys, nibble; print([m for m in ('numpy', 'torch', 'jax', 'cupy', 'ml_dtypes') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_types_are_right():
    done = subprocess.run([sys.executable, "-m", "mypy", "--ignore-missing-imports", str(PACKAGE / "__init__.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
