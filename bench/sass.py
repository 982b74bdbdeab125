#!/usr/bin/env python3
"""Says which GPU kernels of two builds differ in their machine code, or which of one build release memory that they may still read.

usage: bench/sass.py OLD NEW
       bench/sass.py BUILD

OLD, NEW and BUILD are build folders, archives or objects. Every kernel's SASS is hashed with its encodings, but without the names of
symbols: a kernel that was renamed or moved, and nothing else, has the same hash. Prints the kernels whose code changed, those that are
only in one build, and how many are equal. Exits 1 when a kernel changed, appeared or disappeared; 2 when there is nothing to compare.

A change that should not touch kernels is proven so on a machine that has no GPU.

With one build: a warp that arrives at an mbarrier tells a producer that it has read a stage. ptxas may put the arrival before loads from
shared memory whose values are not needed yet; on sm_90 the loads' scoreboards, and those that instructions wait for, are in the encoding.
Prints the kernels in which an arrival follows a load, since the last wait for a barrier, for whose scoreboard nothing has waited; exits 1
if there are any. Needs cuobjdump and nvdisasm on the path, which come
with CUDA or from PyPI (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm); ./dev sass sees to that.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
UPPER = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
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


def overtaken(code):
    """The first load from shared memory that an arrival does not wait for, or None. code: pairs of an instruction's text and the upper half
    of its encoding, whose bits from 41 on are the control bits of sm_90: the scoreboard that it sets, 7 for none, in bits 5 to 7 of them;
    those that it waits for, a bit each, from bit 11 on."""
    loading = {}  # scoreboard: the load that sets it
    for text, upper in code:
        control = upper >> 41
        for scoreboard in [s for s in loading if control >> 11 >> s & 1]:
            del loading[scoreboard]
        if wait := re.match(r"DEPBAR.LE SB(\d), 0x0", text):
            loading.pop(int(wait[1]), None)
        if "TRYWAIT" in text:
            loading.clear()
        elif "SYNCS.ARRIVE" in text and "A1T0" in text:  # without bytes: not a producer's
            if loading:
                return next(iter(loading.values()))
        elif "LDS" in text and control >> 5 & 7 != 7:
            loading[control >> 5 & 7] = text
    return None


def releases(path):
    """(architecture, name) → the load that an arrival of the kernel overtakes, or None; of the kernels of sm_90 that arrive at barriers."""
    found, architecture, name, code, text = {}, "", None, [], None

    def finish():
        if name and "sm_90" in architecture and any("SYNCS.ARRIVE" in text for text, _ in code):
            found[architecture, name] = overtaken(code)

    for file in binaries(path):
        for line in disassemble(file).splitlines():
            if match := ARCHITECTURE.match(line):
                finish()
                architecture, name, code = match[1], None, []
            elif match := FUNCTION.match(line):
                finish()
                name, code = match[1], []
            elif match := INSTRUCTION.search(line):
                text = match[1]
            elif text and (match := UPPER.match(line)):
                code.append((text, int(match[1], 16)))
                text = None
        finish()
        name = None
    return found


def check_releases(path):
    found = releases(path)
    if not found:
        print(f"no kernels of sm_90 with barriers in {path}", file=sys.stderr)
        return 2
    early = {key for key, load in found.items() if load}
    for key, name in zip(sorted(early), demangled([name for _, name in sorted(early)])):
        print(f"may arrive before {found[key]} has read: {name}")
    print(f"{len(found) - len(early)} kernels arrive at barriers when they have read, {len(early)} may arrive before")
    return 1 if early else 0


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
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        return check_releases(sys.argv[1])
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
