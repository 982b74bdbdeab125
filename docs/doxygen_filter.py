#!/usr/bin/env python3
"""Reads a public header as Doxygen wants it: nibble's comments are ordinary ones, and mean what they look like.

    the comment a header begins with              describes the file
    /// before, /* */ before (nibble.h)           describes what follows; a ruler, /* ---- X ---- */, heads what comes behind it
    /// @{ ... /// @}                             everything between has one description
    // or /* */ behind, also on further lines     describes what stands before it
    text that is set in further than its comment  is drawn as it is

usage: docs/doxygen_filter.py HEADER (Doxygen's INPUT_FILTER)
"""

import re
import sys

BEHIND = re.compile(r"^(?P<code>\s*[^\s/*].*?)(?P<gap> +)(?:// (?P<cpp>.*)|/\* (?P<c>.*) \*/)$")
SEVERAL = re.compile(r"^(?P<type>\s+[\w:]+) (?P<names>\w+(?: = [^,;(]+)?(?:, \w+(?: = [^,;(]+)?)+);$")
# What a header says once for all, and what goes without saying: comparison and moving.
ALWAYS = [(re.compile(r"\s+size_t struct_size;$"), "sizeof the struct, as the caller knows it"), (re.compile(r"\s+int32_t reserved;$"), "0"),
          (re.compile(r"NIB_API nib_status nib_\w+_destroy\("), "Ends the handle; NULL does nothing.")]
NEVER = re.compile(r"\s+(friend .*operator==.* = default;$|.*&&( \w+)?\) noexcept)")
RULER = re.compile(r"^/\* -+ (.*?) -+ \*/$")
GROUP = re.compile(r"\s*/// @[{}]$")
HIDDEN = re.compile(r"clang-format|NOLINT|// namespace")


def text(line):
    """Comment text without what Doxygen would take for a tag or a command."""
    return re.sub(r"([\\@<>#])", r"\\\1", line)


def comment(lines):
    """The lines of one comment; what is set in, and blank lines within it, is drawn as it is."""
    out, drawn = [], False
    for i, line in enumerate(lines):
        set_in = line.startswith("  ") or (drawn and not line and any(rest.startswith("  ") for rest in lines[i + 1 : i + 2]))
        before = "\\verbatim" if set_in and not drawn else "\\endverbatim " if drawn and not set_in else ""
        drawn = set_in
        out.append(before + (line if drawn else text(line)))
    return out[:-1] + [out[-1] + (" \\endverbatim" if drawn else "")]


def block(lines, first=""):
    """As many lines as there were, that warnings point to the right one."""
    return f"/** {first}" + "\n".join(comment(lines)) + " */"


def stripped(line, prefix):
    """The text of a comment's line behind its prefix and one space."""
    return re.sub(rf"^\s*{prefix} ?", "", line).rstrip()


def behind(code, said):
    """A declaration and what is said of it: of each name, where it declares several."""
    said = f" /**< {text(said)} */"
    several = SEVERAL.match(code)
    return " ".join(f"{several['type']} {name};{said}" for name in several["names"].split(", ")) if several else code + said


def convert(source):
    lines, out, i = source.split("\n"), [], 0
    while i < len(lines):
        line = lines[i]
        start = i
        if line.startswith("/*") and RULER.match(line):
            out.append(f"/** @name {RULER.match(line)[1]} */")
            i += 1
        elif line.lstrip().startswith("/*"):  # C: up to its end
            while not lines[i].endswith("*/"):
                i += 1
            i += 1
            body = [stripped(lines[start], r"/\*")] + [stripped(x, r"\*") for x in lines[start + 1 : i]]
            body[-1] = re.sub(r" ?\*/$", "", body[-1])
            out.append(block(body[:-1], "\\file\n") if start == 0 else block(body))
        elif line.startswith("//") and start == 0:
            while lines[i].startswith("//"):
                i += 1
            out.append(block([stripped(x, "//") for x in lines[:i]], "\\file\n"))
            i += lines[i] == "#pragma once"
        elif GROUP.match(line):
            out.append(f"/** {stripped(line, '///')} */")
            i += 1
        elif line.lstrip().startswith("///"):
            while lines[i].lstrip().startswith("///") and not GROUP.match(lines[i]):
                i += 1
            out.append(block([stripped(x, "///") for x in lines[start:i]]))
        elif (m := BEHIND.match(line)) and not HIDDEN.search(line):
            i += 1
            column = len(m["code"] + m["gap"])
            body = [m["cpp"] or m["c"] or ""]
            while i < len(lines) and re.match(rf" {{{column}}}// ", lines[i]):
                body.append(stripped(lines[i], "//"))
                i += 1
            out.append(behind(m["code"], " ".join(body)))
        else:
            for declaration, said in ALWAYS:
                if declaration.match(line):
                    line = f"/** {said} */ {line}"
            if NEVER.match(line):
                line = ""
                while not lines[i].endswith((";", "}")) or (i > start and lines[i].endswith(";")):  # a function's body
                    out.append("")
                    i += 1
            out.append(line)
            i += 1
    return "\n".join(out)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(convert(file.read()))
