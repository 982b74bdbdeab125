#!/usr/bin/env python3
"""The recipes of packaging/ are of this version, and the options that they set are options of this build.

usage: recipes_test.py SOURCE
"""
import json
import pathlib
import re
import sys

source = pathlib.Path(sys.argv[1])
build = (source / "CMakeLists.txt").read_text()
version = re.search(r"project\(nibble VERSION ([0-9.]+)", build)[1]
said = json.loads((source / "packaging/vcpkg/nibble/vcpkg.json").read_text())["version"]
problems = [f"vcpkg.json is of version {said}, nibble of {version}"] if said != version else []
options = set(re.findall(r"^(?:option|set)\((NIBBLE_\w+)", build, re.M))
for recipe in ("packaging/conan/conanfile.py", "packaging/vcpkg/nibble/portfile.cmake"):
    used = set(re.findall(r"NIBBLE_\w+", (source / recipe).read_text()))
    if not used or used - options:
        problems.append(f"{recipe} sets {sorted(used - options)}, which nibble has not; it has {sorted(options)}")
sys.exit("\n".join(problems) or 0)
