#!/usr/bin/env python3
"""What the compiler and the linker put around hostile input is in these programs and libraries; a Python module keeps to itself.

usage: hardening.py READELF FILE...
"""
import pathlib
import re
import subprocess
import sys

# What a function begins with that may be jumped to: a few in Debian's start files, and everywhere with the option. The file's notes do
# not tell: those start files have none, and a program has what all of its parts have.
LANDING = {"X86-64": bytes.fromhex("f30f1efa"), "AArch64": bytes.fromhex("3f2303d5")}


def missing(readelf, file):
    def show(option):
        return subprocess.run([readelf, "-W", option, file], capture_output=True, text=True, check=True).stdout

    header, segments, dynamic, symbols = map(show, ("-h", "-l", "-d", "--dyn-syms"))
    defined = re.findall(r"(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +(?!UND)\S+ +(\S+)", symbols)
    landing = next((code for machine, code in LANDING.items() if machine in header), b"")
    wanted = {
        "position independent (-fPIE -pie)": "DYN" in header,
        "read-only relocations (-z relro)": "GNU_RELRO" in segments,
        "symbols bound when it starts (-z now)": re.search(r"BIND_NOW|FLAGS_1\).*NOW", dynamic),
        "no executable stack": not re.search(r"GNU_STACK.*\bRWE\b", segments),
        "stack canaries (-fstack-protector-strong)": "__stack_chk_fail" in symbols,
        "bounds of C's functions (_FORTIFY_SOURCE)": re.search(r"\b__\w+_chk\b", symbols),
        "control-flow protection (-fcf-protection, -mbranch-protection)": pathlib.Path(file).read_bytes().count(landing) > 10,
        # Other modules of the interpreter have symbols of the same names: of libstdc++, of CUDA's runtime.
        "its libraries' symbols kept inside (a version script)": "/_core." not in file or all("PyInit" in name for name in defined),
    }
    return [name for name, there in wanted.items() if not there]


readelf, *files = sys.argv[1:]
failures = [f"{file}: without {name}" for file in files for name in missing(readelf, file)]
sys.exit("\n".join(failures) or 0)
