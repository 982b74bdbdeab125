#!/usr/bin/env python3
"""Checks that the instructions of every level of instruction sets stay inside the namespaces of that level and of those above it
(see src/core/target.hpp): one inline function compiled for AVX and shared with the rest would crash the library on older
machines. And that there are instructions of every level.

usage: tests/isa_leak.py LIBRARY [OBJDUMP]
"""

import collections
import re
import subprocess
import sys

PARENT = {"avx2": "", "avx2vnni": "avx2", "avx512": "avx2", "avx512vnni": "avx512", "avx512bf16": "avx512vnni", "amx": "avx512bf16",
          "dotprod": "", "i8mm": "dotprod", "neonbf16": "i8mm"}

# What nothing below these levels may execute, as regular expressions of mnemonic and operands; the first that matches counts.
INSTRUCTIONS = {
    "x86-64": [
        (r"tdp|tile|(ld|st)tilecfg", {"amx"}),
        (r"vdpbf16|vcvtne|vperm[it2]*b ", {"avx512bf16"}),
        (r"vpdp", {"avx2vnni", "avx512vnni"}),
        (r".*%zmm|.*%k[1-7]|.*%[xy]mm(1[6-9]|2\d|3[01])", {"avx512"}),
        (r"v", {"avx2"}),  # every mnemonic of AVX, F16C and FMA starts so, and no other
    ],
    "aarch64": [
        (r".*\bz\d+\.|f\w+\tv\d+\.[48]h, v\d+\.[48]h", set()),  # SVE, f16 arithmetic: no level's
        (r"bf(dot|mmla|mlal|cvt)", {"neonbf16"}),
        (r"(us|su)dot|(s|u|us)mmla", {"i8mm"}),
        (r"[su]dot", {"dotprod"}),
        (r"(cas|swp|ld(add|clr|eor|set)|sqrdml[as]h|crc32)", {"dotprod"}),  # those of ARMv8.2, which its region implies
    ],
}

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^ *[0-9a-f]+:\t(?:\{\w+\} )?(.*)")
# nibble::cpu::avx2::f is of level avx2, and so is nibble::avx2_loops::f; nibble::avx2_loops::vnni_f is of avx2vnni.
# The names of templates begin with what they return.
LEVEL = re.compile(r"(?:[\w ]+ )?nibble::(?:cpu::)?(?:\(anonymous namespace\)::)?(\w+?)(?:_loops)?::(?:(vnni|bf16)_)?")
OUTLINE_ATOMICS = re.compile(r"__aarch64_")  # libgcc's, which ask the machine first


def levels_of(function):
    """The level of the function's namespace and those below it."""
    match = LEVEL.match(function)
    level = match[1] + (match[2] or "") if match else ""
    levels = set()
    while level in PARENT:
        levels.add(level)
        level = PARENT[level]
    return levels


def main():
    objdump = sys.argv[2] if len(sys.argv) > 2 else "objdump"
    disassemble = [objdump, "-d", "--no-show-raw-insn", "-C", sys.argv[1]]
    lines = subprocess.run(disassemble, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    machine = "aarch64" if any("file format elf64-littleaarch64" in line for line in lines) else "x86-64"
    rules = [(re.compile(pattern), needed) for pattern, needed in INSTRUCTIONS[machine]]
    function, levels, found, leaks = "", set(), collections.Counter(), {}
    for line in lines:
        if match := FUNCTION.match(line):
            function, levels = match[1], levels_of(match[1])
        elif match := INSTRUCTION.match(line):
            needed = next((needed for pattern, needed in rules if pattern.match(match[1])), None)
            if needed is None or OUTLINE_ATOMICS.match(function):
                continue
            found["|".join(sorted(needed))] += 1
            if not levels & needed:
                leaks.setdefault(function, line.strip())
    for name, line in leaks.items():
        print(f"{name} uses {line}")
    counts = [f"{count} instructions of {level or 'no level'}" for level, count in sorted(found.items())]
    print(f"{machine}:", ", ".join(counts) or "none")
    missing = [" or ".join(sorted(needed)) for _, needed in rules if needed and not found["|".join(sorted(needed))]]
    for level in missing:
        print(f"no instruction of {level} anywhere: are its kernels in the library?")
    return 1 if leaks or missing else 0


if __name__ == "__main__":
    sys.exit(main())
