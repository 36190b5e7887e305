"""Compares the planned memory of a run with the GPU's count, both from the output of `ulysses train`: planned_memory.py LOG."""

import re
import sys
from pathlib import Path

# Ranks that share a GPU do not reach their peaks at the same time.
LEAST, MOST = 0.90, 1.25
UNITS = {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}


def mebibytes(pattern: str, text: str) -> float | None:
    found = re.search(pattern + r" ([0-9.]+) ([KMG]iB)", text)
    return float(found[1]) * UNITS[found[2]] if found else None


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    # Ranks that are threads share a GPU, others have one each.
    planned = mebibytes(r"GPU memory of \d+ ranks:", text) or mebibytes("planned peak memory:", text)
    measured = mebibytes("peak memory(?: max)?", text)
    if planned is None or measured is None or not LEAST <= planned / measured <= MOST:
        sys.exit(f"{sys.argv[1]}: {planned} MiB planned, {measured} MiB measured")
    print(f"{planned} MiB planned, {measured} MiB measured")


if __name__ == "__main__":
    main()
