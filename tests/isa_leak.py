#!/usr/bin/env python3
"""Checks that wide vector instructions stay inside the namespaces of their instruction sets (see src/core/target.hpp): one
inline function compiled for AVX and shared with the rest would crash the library on older machines.

usage: tests/isa_leak.py LIBRARY
"""

import re
import subprocess
import sys

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
WIDE = re.compile(r"%[yz]mm|%k[1-7]")
ALLOWED = re.compile(r"nibble::(cpu::)?(avx2|avx512)(_loops)?::")


def main():
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", "-C", sys.argv[1]], check=True, stdout=subprocess.PIPE, text=True)
    function, wide, leaks = "", 0, {}
    for line in listing.stdout.splitlines():
        if match := FUNCTION.match(line):
            function = match[1]
        elif WIDE.search(line):
            wide += 1
            if not ALLOWED.match(function):
                leaks.setdefault(function, line.strip())
    for name, line in leaks.items():
        print(f"{name} uses {line}")
    if wide == 0:
        print("no wide instruction anywhere: is this the library?")
    return 1 if leaks or wide == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
