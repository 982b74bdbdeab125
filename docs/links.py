#!/usr/bin/env python3
"""Follows every link of the Markdown files to a file or a heading of this repository. Prints those that lead nowhere; exit code 1 then.

usage: docs/links.py
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]*)\)")


def anchors(text):
    """What GitHub calls the headings: lower case, letters, digits, hyphens and underscores; spaces become hyphens."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*?) *$", text, re.MULTILINE)}


def main():
    wrong = 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in LINK.findall(CODE.sub("", page.read_text())):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if target.exists() and (not anchor or anchor in anchors(target.read_text())):
                continue
            print(f"{page.relative_to(ROOT)}: {link} leads nowhere")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
