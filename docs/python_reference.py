#!/usr/bin/env python3
"""The Python package's reference, from its docstrings, by pdoc: ./dev reference. What is public and has none, and a `nibble.name` in one
that is nothing, are errors; then nothing is written.

usage: docs/python_reference.py OUT_DIR (with the package and pdoc importable)
"""

import importlib
import inspect
import pathlib
import re
import sys

import pdoc

MODULES = {"nibble": "numpy", "nibble.errors": "numpy", "nibble.torch": "torch", "nibble.transformers": "transformers", "nibble.peft": "peft",
           "nibble.compat.vllm": "torch", "nibble.compat.sglang": "torch", "nibble.compat.deep_gemm": "torch", "nibble.vllm": "numpy"}  # and what each needs


def said(thing):
    """A docstring without the signature that bindings begin theirs with."""
    return re.sub(r"\A(\w*\(.*\)( -> .*)?\n)+", "", (inspect.getdoc(thing) or "") + "\n").strip()


def public(module):
    """(name, object) of what users see: the names a module exports, and the members of its classes."""
    for name in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
        thing = getattr(module, name)
        if inspect.ismodule(thing) or isinstance(thing, str) or (getattr(thing, "__module__", None) or "").split(".")[0] != "nibble":
            continue
        yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, (property, classmethod, staticmethod))):
                    yield f"{module.__name__}.{name}.{member}", getattr(thing, member)


def exists(path):
    """Whether a dotted name leads to something."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


def has(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def main():
    missing = [name for name, needed in MODULES.items() if not has(needed)]
    names = [name for name in MODULES if name not in missing]
    for name in missing:
        print(f"{name} is left out, as there is no {MODULES[name]} here", file=sys.stderr)
    wrong = []
    for module in map(importlib.import_module, names):
        for name, thing in [(module.__name__, module), *public(module)]:
            text = said(thing)
            if not text:
                wrong.append(f"{name} is not documented")
            wrong += [f"{name} speaks of {path}, which is nothing" for path in re.findall(r"`(nibble(?:\.\w+)+)", text)
                      if not any(path.startswith(other) for other in missing) and not exists(path)]
    if wrong:
        sys.exit("\n".join(wrong))
    pdoc.render.configure(docformat="markdown", search=True)
    pdoc.pdoc(*names, output_directory=pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
