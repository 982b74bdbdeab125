#!/usr/bin/env python3
"""Says which GPU kernels of two builds differ in their machine code.

usage: bench/sass.py OLD NEW

OLD and NEW are build folders, archives or objects. Every kernel's SASS is hashed with its encodings, but without the names of symbols:
a kernel that was renamed or moved, and nothing else, has the same hash. Prints the kernels whose code changed, those that are only in
one build, and how many are equal. Exits 1 when a kernel changed, appeared or disappeared; 2 when there is nothing to compare.

A change that should not touch kernels is proven so on a machine that has no GPU. Needs cuobjdump and nvdisasm on the path, which come
with CUDA or from PyPI (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm); ./dev sass sees to that.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

FUNCTION = re.compile(r"^\s*Function : (\S+)")
ARCHITECTURE = re.compile(r"^arch = (\S+)")
SYMBOL = re.compile(r"\b\.?_Z\w+|\$\S+")  # mangled names; labels of what the compiler keeps out of line


def binaries(path):
    """The files of a build that hold kernels: the objects that nvcc made of .cu files, or the file itself."""
    path = pathlib.Path(path)
    return sorted(path.rglob("*.cu.o")) if path.is_dir() else [path]


def disassemble(path):
    return subprocess.run(["cuobjdump", "-sass", str(path)], check=True, stdout=subprocess.PIPE, text=True).stdout


def kernels(path):
    """(architecture, name) → hash of the code."""
    codes, architecture, code = {}, "", None
    for file in binaries(path):
        for line in disassemble(file).splitlines():
            if match := ARCHITECTURE.match(line):
                architecture = match[1]
            elif match := FUNCTION.match(line):
                code = codes[architecture, match[1]] = hashlib.sha256()
            elif code is not None and "/*" in line:
                code.update(SYMBOL.sub("_", " ".join(line.split())).encode() + b"\n")
    return {key: code.hexdigest() for key, code in codes.items()}


def demangled(names):
    if not names:
        return []
    tool = shutil.which("c++filt")
    return subprocess.run([tool, *names], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines() if tool else list(names)


def show(what, keys):
    keys = sorted(keys)
    for (architecture, _), name in zip(keys, demangled([name for _, name in keys])):
        print(f"{what} {architecture} {name}")


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    old, new = kernels(sys.argv[1]), kernels(sys.argv[2])
    if not old or not new:
        print(f"no kernels in {sys.argv[1] if not old else sys.argv[2]}", file=sys.stderr)
        return 2
    changed = {key for key in old.keys() & new.keys() if old[key] != new[key]}
    gone, added = old.keys() - new.keys(), new.keys() - old.keys()
    renamed = 0
    for key in sorted(added):  # the same code on both sides is one kernel under two names
        twin = next((other for other in sorted(gone) if (other[0], old[other]) == (key[0], new[key])), None)
        if twin:
            gone, added, renamed = gone - {twin}, added - {key}, renamed + 1
    show("changed", changed)
    show("gone", gone)
    show("new", added)
    print(f"{len(old.keys() & new.keys()) - len(changed)} kernels are equal, {renamed} equal under another name, "
          f"{len(changed)} changed, {len(gone)} gone, {len(added)} new")
    return 1 if changed or gone or added else 0


if __name__ == "__main__":
    sys.exit(main())
