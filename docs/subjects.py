#!/usr/bin/env python3
"""Checks the subjects of the commits that the upstream branch does not have: `area: what it does`, at most 72 characters.

usage: docs/subjects.py [REPOSITORY]

Without an upstream branch the last commit alone is checked; merges are not, and nothing is where there is no Git. Exits 1 when a
subject does not comply.
"""

import pathlib
import re
import subprocess
import sys

LIMIT = 72
SUBJECT = re.compile(r"[A-Za-z][\w.,/* -]*: \S.*")


def git(root, *arguments):
    """What git prints, or None when it fails or is not there."""
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def problem(subject):
    """Why a subject does not comply; "" when it does."""
    if len(subject) > LIMIT:
        return f"{len(subject)} characters, at most {LIMIT}"
    return "" if SUBJECT.fullmatch(subject) else "no area: write 'area: what it does'"


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    commits = ["@{upstream}..HEAD"] if git(root, "rev-parse", "--verify", "--quiet", "@{upstream}") else ["-1", "HEAD"]
    log = git(root, "log", "--no-merges", "--format=%h %s", *commits, "--") or ""
    lines = [f"commit {name}: {why}: {subject}" for name, _, subject in (line.partition(" ") for line in log.splitlines())
             if (why := problem(subject))]
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
