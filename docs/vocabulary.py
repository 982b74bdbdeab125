#!/usr/bin/env python3
"""Checks that interfaces, sources and documents use no retired word of docs/vocabulary.json: each thing has one name.

usage: docs/vocabulary.py [ROOT]

A word is a regular expression that is looked for between two word boundaries, in some of these places:

  headers    the code of include/nibble, without comments
  options    the options that the sources of cli/ name
  keys       the JSON keys that the sources of cli/ write and read
  python     the functions and parameters of python/nibble and python/src
  sources    the code and the comments of src/
  documents  the Markdown files but CHANGELOG.md

Exits 1 when a retired word is found, and names the place and the word to use.
"""

import ast
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
OPTION = re.compile(r'"(--[a-z][a-z-]*)')
KEY = re.compile(r'(?:\[|\{|\.at\(|\.value\(|\.contains\()"(\w+)"')
BOUND = re.compile(r'"(\w+)"_a\b|\.def\("(\w+)"')
SOURCES = {".cpp", ".hpp", ".h", ".inl", ".inc", ".cu", ".cuh"}


def found(pattern, path):
    """(line, word) of what the first group that took part in each match says."""
    text = path.read_text()
    return [(text.count("\n", 0, match.start()) + 1, next(filter(None, match.groups()))) for match in pattern.finditer(text)]


def headers(root):
    for path in sorted((root / "include/nibble").iterdir()):
        code = COMMENT.sub(lambda match: "\n" * match.group().count("\n"), path.read_text())
        for number, line in enumerate(code.split("\n"), 1):
            yield path, number, line


def lines_of(paths):
    for path in sorted(paths):
        for number, line in enumerate(path.read_text().split("\n"), 1):
            yield path, number, line


def sources(root):
    return lines_of(path for path in (root / "src").rglob("*") if path.suffix in SOURCES)


def documents(root):
    return lines_of(path for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")] if path.name != "CHANGELOG.md")


def in_tool(pattern):
    def names(root):
        for path in sorted((root / "cli").rglob("*.[ch]pp")):
            for number, name in found(pattern, path):
                yield path, number, name

    return names


def python(root):
    for path in sorted((root / "python/nibble").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node.lineno, node.name
            elif isinstance(node, ast.arg):
                yield path, node.lineno, node.arg
    for path in sorted((root / "python/src").glob("*.cpp")):
        for number, name in found(BOUND, path):
            yield path, number, name


PLACES = {"headers": headers, "options": in_tool(OPTION), "keys": in_tool(KEY), "python": python, "sources": sources,
          "documents": documents}


def problems(root, retired):
    """One line for each retired word in the source tree `root`."""
    for place, names in PLACES.items():
        words = [(re.compile(rf"(?<![\w-])(?:{word['was']})(?![\w-])"), word) for word in retired if place in word["in"]]
        for path, number, name in names(root):
            for pattern, word in words:
                if match := pattern.search(name):
                    yield f"{path.relative_to(root)}:{number}: '{match.group()}' is retired ({place}); use {word['now']}"


def main():
    root = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    lines = list(problems(root, json.loads((ROOT / "docs/vocabulary.json").read_text())["retired"]))
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
