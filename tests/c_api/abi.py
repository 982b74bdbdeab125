#!/usr/bin/env python3
"""The C interface's ABI: what include/nibble/nibble.h declares, laid out by the compiler, and what libnibble.so exports.

usage: abi.py HEADER LIBRARY COMPILER [--update]

Compares it with abi.txt beside this file, which lists every function, constant and member with its place. Layouts are the same for
every 64-bit compiler: sizes are fixed, and there is no padding, which is checked too.
"""
import difflib
import pathlib
import re
import subprocess
import sys
import tempfile

COMMITTED = pathlib.Path(__file__).parent / "abi.txt"


def declarations(header):
    """The header without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", " ", header.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\s+", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))


def members(body):
    """(name, type) of the members in the body of a struct."""
    for declaration in filter(str.strip, body.split(";")):
        first, *others = declaration.split(",")
        kind, name, extent = re.fullmatch(r"\s*(.*?)\s*(\w+)(\[\w+\])?\s*", first).groups()
        for declarator in [name, *map(str.strip, others)]:
            yield declarator, kind + (extent or "")


def layout(header, text, compiler):
    """(struct, member, type, offset, size) of all members, and (struct, None, None, 0, size), as the compiler places them."""
    structs = [(name, dict(members(body))) for name, body in re.findall(r"typedef struct (nib_\w+) \{(.*?)\} nib_\w+;", text)]
    lines = [f'#include "{header.resolve()}"', "#include <stdio.h>", "int main(void) {"]
    for struct, names in structs:
        lines.append(f'  printf("{struct} - 0 %zu\\n", sizeof({struct}));')
        for name in names:
            lines.append(f'  printf("{struct} {name} %zu %zu\\n", offsetof({struct}, {name}), sizeof((({struct}*)0)->{name}));')
    lines.append("  return 0;\n}\n")
    with tempfile.TemporaryDirectory() as directory:
        source, program = pathlib.Path(directory, "layout.c"), pathlib.Path(directory, "layout")
        source.write_text("\n".join(lines))
        subprocess.run([compiler, "-std=c11", "-o", program, source], check=True)
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    types = dict(structs)
    for line in output.splitlines():
        struct, member, offset, size = line.split()
        yield struct, member if member != "-" else None, types[struct].get(member), int(offset), int(size)


def describe(header, compiler):
    text = declarations(header)
    lines, expected, end = [], {}, {}
    for struct, member, kind, offset, size in layout(header, text, compiler):
        if member is None:
            expected[struct], end[struct] = size, 0
            lines.append(f"struct {struct}: {size} bytes")
            continue
        if offset != end[struct]:
            sys.exit(f"{struct} has padding before {member}: bytes {end[struct]} to {offset}")
        end[struct] = offset + size
        lines.append(f"  {struct}.{member}: {kind}, {size} bytes at {offset}")
    for struct, size in expected.items():
        if end[struct] != size or size % 8 != 0:
            sys.exit(f"{struct} has {size} bytes, of which members take {end[struct]}: there is padding, or no multiple of 8")
    lines += [f"constant {name} = {value}" for name, value in re.findall(r"\b(NIB_\w+) = (\d+)", text)]
    lines += [f"callback {what}" for what in re.findall(r"typedef ([^;{}]*\(\*nib_\w+\)\([^;]*\));", text)]
    lines += [f"function {what}" for what in re.findall(r"NIB_API ([^;]*);", text)]
    return lines


def exported(library):
    output = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    symbols = {line.split()[-1] for line in output.splitlines()}
    return {re.sub(r"@@?NIBBLE_1$", "", symbol) for symbol in symbols} - {"NIBBLE_1"}


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--update"]
    header, library, compiler = pathlib.Path(arguments[0]), arguments[1], arguments[2]
    lines = describe(header, compiler)
    declared = {re.search(r"(nib_\w+)\(", line).group(1) for line in lines if line.startswith("function ")}
    wrong = [f"{name} is declared and not exported" for name in sorted(declared - exported(library))]
    wrong += [f"{name} is exported and not declared" for name in sorted(exported(library) - declared)]
    if wrong:
        sys.exit("\n".join(wrong))
    if "--update" in sys.argv:
        COMMITTED.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    committed = COMMITTED.read_text(encoding="utf-8").splitlines()
    difference = list(difflib.unified_diff(committed, lines, str(COMMITTED), str(header), n=0, lineterm=""))
    if difference:
        sys.exit("\n".join(difference) + "\n\nThe ABI changed. What was added: raise NIB_ABI_MINOR, and abi.py --update. What was "
                 "moved, changed or removed: undo it, or it is another NIB_ABI_MAJOR.")
    print(f"{len(declared)} functions, {len(lines)} lines")


main()
