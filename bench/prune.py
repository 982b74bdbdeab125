#!/usr/bin/env python3
"""Which tiles of the wgmma kernels a planner could do without.

  bench/prune.py bench/results/{h100,h200}/{survey-*,shards}.json

Of each table of kernels, the tiles that can go together without any measured layer and number of tokens then taking more than 3 % longer with the
fastest kernel that is left, on any of the GPUs. The one that costs least goes first.
"""

import argparse
import json
from collections import defaultdict

from survey import called, times, whole

WORST = 1.03
TABLES = {"f16": "wna16", "bf16": "wna16", "s8": "w8a8", "e4m3": "w8a8", "s8i16": "wna8", "s8x3": "fixed_point", "f16x2": "pairs"}  # by the activations in a kernel's name


def measured(paths):
    """The microseconds by tile of each layer, by table."""
    tables = defaultdict(list)
    for path in paths:
        with open(path) as file:
            survey = json.load(file)
        for row in called(whole(survey)):
            us = times(survey, row)
            acts = {name.split("_")[2] for name in us if is_tile(name)}
            if acts:
                tables[TABLES[min(acts)]].append({name.split("__")[1]: t for name, t in us.items()})
    return tables


def is_tile(name):
    return "sm90_wgmma" in name or "sm90_streamk" in name


def worst(cells, kept):
    return max(min((us for name, us in cell.items() if name in kept), default=float("inf")) / min(cell.values()) for cell in cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", nargs="+", metavar="SURVEY")
    for table, cells in sorted(measured(parser.parse_args().surveys).items()):
        kept = {name for cell in cells for name in cell}
        print(f"{table}: {len(cells)} layers and numbers of tokens, {sum(map(is_tile, kept))} tiles")
        while True:
            ratio, name = min((worst(cells, kept - {name}), name) for name in kept if is_tile(name))
            if ratio > WORST:
                break
            kept.remove(name)
            print(f"  {name}: {ratio:.3f}")


if __name__ == "__main__":
    main()
