#!/usr/bin/env python3
"""Checks that every include of src/ agrees with the map of rooms, docs/rooms.json, which HACKING.md shows.

usage: docs/rooms.py

A room is a folder or a file of src/. Its sources may include what is in the room itself, in the rooms that it `uses`, and the public
headers of those. `upward` lists the includes that break the map today: it only shrinks. Exits 1 when an include is neither on the map
nor in that list, or when an entry of the list is no longer needed.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"}
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)


def main():
    data = json.loads((ROOT / "docs/rooms.json").read_text())
    rooms = {room["room"]: room for room in data["rooms"]}
    public = {f"nibble/{header}": name for name, room in rooms.items() for header in room["headers"]}

    def room_of(path):
        """The innermost room that a path of src/, or a public header, is in."""
        parts = path.split("/")
        names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
        return public.get(path) or next((name for name in names if name in rooms), None)

    problems, upward = [], set()
    headers = {f"nibble/{path.name}" for path in (ROOT / "include/nibble").iterdir()}
    problems += [f"include/{header} is of no room: docs/rooms.json" for header in sorted(headers - public.keys())]
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in SOURCES:
            continue
        source = path.relative_to(ROOT / "src").as_posix()
        room = room_of(source)
        if room is None:
            problems.append(f"src/{source} is in no room: docs/rooms.json")
            continue
        for included in INCLUDE.findall(path.read_text()):
            if included not in public and not (ROOT / "src" / included).exists():
                continue  # of the system, or of a library
            if room_of(included) not in (room, *rooms[room]["uses"]):
                upward.add(f"{source} {included}")
    problems += [f"src/{edge.replace(' ', ' includes ')}: {room_of(edge.split()[0])} does not use {room_of(edge.split()[1])}"
                 for edge in sorted(upward - set(data["upward"]))]
    problems += [f"docs/rooms.json: no upward include any more, take it off the list: {edge}" for edge in sorted(set(data["upward"]) - upward)]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
