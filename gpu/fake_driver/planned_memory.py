"""Compares the planned memory of a run with the GPU's count, both from the output of `ulysses train`: planned_memory.py LOG."""

import re
import sys
from pathlib import Path

UNITS = {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}


def mebibytes(pattern: str, text: str) -> float | None:
    found = re.search(pattern + r" ([0-9.]+) ([KMG]iB)", text)
    return float(found[1]) * UNITS[found[2]] if found else None


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    shared = mebibytes(r"GPU memory of \d+ ranks:", text)
    planned = shared or mebibytes("planned peak memory:", text)
    measured = mebibytes("peak memory(?: max)?", text)
    # Ranks that share a GPU need not reach their peaks at the same time.
    most = 2 if shared else 1.1
    if planned is None or measured is None or not 0.9 <= planned / measured <= most:
        sys.exit(f"{sys.argv[1]}: {planned} MiB planned, {measured} MiB measured")
    print(f"{planned} MiB planned, {measured} MiB measured")


if __name__ == "__main__":
    main()
