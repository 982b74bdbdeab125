#!/usr/bin/env python3
"""`./dev build && cmake --install build` works in a fresh clone: what is installed is what the target of ./dev build makes.

usage: installed_test.py NINJA BUILD SOURCE
"""
import pathlib
import re
import subprocess
import sys


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main():
    ninja, build, source = sys.argv[1:]
    built_by_dev = re.search(r"^cmd_build\(\) \{ build release (.*); \}$", (pathlib.Path(source) / "dev").read_text(), re.M)[1].split()
    outputs = {line.rsplit(": ", 1)[0] for line in run(ninja, "-C", build, "-t", "targets", "all").splitlines()}
    script = (pathlib.Path(build) / "cmake_install.cmake").read_text()
    installed = {path for path in re.findall(rf'"{re.escape(build)}/([^"]*)"', script) if path in outputs}
    if not any(path.endswith("libnibble.a") for path in installed):
        sys.exit(f"the install script names no library that is built: {sorted(installed)}")
    made = set(run(ninja, "-C", build, "-t", "commands", *built_by_dev).split())  # the words of every command
    missing = [path for path in installed if path not in made]
    if missing:
        sys.exit(f"./dev build makes {built_by_dev}, without {missing}, which cmake --install wants")
    print(f"{len(installed)} files, all made by {built_by_dev}")


main()
