#!/usr/bin/env python3
"""Runs the commands that the pages of docs/schemes and docs/howto show, each page in the order they stand there: the blocks that begin with ```sh.

usage: docs/commands.py NIBBLE [PAGE...]
"""

import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs/schemes", ROOT / "docs/howto"]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def write_calibration(checkpoint, path):
    """MODULE.input_absmax of every linear layer, ones but for a few outliers: what docs/schemes/README.md promises."""
    with open(checkpoint / "model.safetensors", "rb") as file:
        tensors = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
    header, body = {}, b""
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        k = tensor["shape"][1]
        data = struct.pack(f"<{k}f", *(20.0 if i % 256 == 0 else 1.0 for i in range(k)))
        header[name.removesuffix("weight") + "input_absmax"] = {"dtype": "F32", "shape": [k], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def main():
    nibble = pathlib.Path(sys.argv[1]).resolve()
    pages = [pathlib.Path(page).resolve() for page in sys.argv[2:]] or [page for folder in PAGES for page in sorted(folder.glob("*.md"))]
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        (work / "bin").mkdir()
        (work / "bin/nibble").symlink_to(nibble)
        environment = {**os.environ, "PATH": f"{work / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(["nibble", "sample", "float"], cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL)
        write_calibration(work / "float", work / "acts.safetensors")
        (work / "gptq-act-order").symlink_to(ROOT / "tests/golden/gptq/v1_4bit_act_order")
        inputs = {p.name for p in work.iterdir()}
        for page in pages:
            for block in BLOCK.findall(page.read_text()):
                run = subprocess.run(["bash", "-exc", block], cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                if run.returncode != 0:
                    sys.exit(f"{page.name}: exit code {run.returncode}\n{run.stdout}")
            for output in work.iterdir():
                if output.name not in inputs:
                    shutil.rmtree(output) if output.is_dir() else output.unlink()


if __name__ == "__main__":
    main()
