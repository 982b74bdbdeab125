#!/usr/bin/env python3
"""Counts the instructions of the innermost loops of AArch64 machine code that multiply: what the costs of kernels are derived from that
no machine here can measure.

usage: bench/aarch64_loops.py OBJECT... [--objdump PROGRAM]

A line a loop: its products, how many instructions those take, all instructions, and products an instruction. Loops of few products, and those
whose sums do not stay in registers, are recognised by the last two numbers.
"""

import argparse
import re
import subprocess

# Products of one instruction: 16 lanes of bytes or 8 of bf16, each with one partner, in matrix products with two; 4 lanes of floats.
PRODUCTS = {"usdot": 16, "sdot": 16, "usmmla": 32, "smmla": 32, "bfdot": 8, "bfmmla": 16, "fmla": 4}
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?")
BRANCH = re.compile(r"(?:b\.\w+|cbn?z|tbn?z|b)$")
TARGET = re.compile(r"([0-9a-f]+) <")


def functions(program, path):
    """The name of each function and its instructions: address, mnemonic, operands."""
    text = subprocess.run([program, "-d", "--no-show-raw-insn", "-C", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    name, body = None, []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            if body:
                yield name, body
            name, body = match[1], []
        elif match := INSTRUCTION.match(line):
            body.append((int(match[1], 16), match[2], match[3] or ""))
    if body:
        yield name, body


def innermost_loops(body):
    """The instructions between the target of a branch backwards and the branch, where no other such loop is among them."""
    loops = []
    for address, mnemonic, operands in body:
        target = TARGET.search(operands) if BRANCH.match(mnemonic) else None
        if target and body[0][0] <= int(target[1], 16) < address:
            loops.append((int(target[1], 16), address))
    for begin, end in loops:
        if not any(begin <= other[0] and other[1] <= end for other in loops if other != (begin, end)):
            yield [entry for entry in body if begin <= entry[0] <= end]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", metavar="OBJECT")
    parser.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    arguments = parser.parse_args()
    found = set()
    for path in arguments.objects:
        for name, body in functions(arguments.objdump, path):
            for loop in innermost_loops(body):
                counts = {m: sum(entry[1] == m for entry in loop) for m in PRODUCTS}
                products = sum(PRODUCTS[m] * count for m, count in counts.items())
                if products:
                    stack = sum("[sp" in entry[2] for entry in loop)
                    kinds = " ".join(f"{count} {m}" for m, count in counts.items() if count)
                    found.add((name.split("(")[0].split(" ")[-1] if "(anonymous" not in name else
                               name.replace("(anonymous namespace)::", "").split("(")[0].split(" ")[-1],
                               kinds, products, len(loop), stack))
    print(f"{'function':44} {'multiply':>22} {'products':>8} {'all':>5} {'stack':>5} {'a instruction':>13}")
    for name, kinds, products, instructions, stack in sorted(found):
        print(f"{name:44} {kinds:>22} {products:8} {instructions:5} {stack:5} {products / instructions:13.1f}")


if __name__ == "__main__":
    main()
