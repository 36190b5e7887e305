"""Compares the planned memory of a run with the GPU's count, both from the output of `ulysses train`: planned_memory.py LOG."""

import re
import sys
from pathlib import Path

TOLERANCE = 0.10
UNITS = {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}


def mebibytes(pattern: str, text: str) -> float | None:
    found = re.search(pattern + r" ([0-9.]+) ([KMG]iB)", text)
    return float(found[1]) * UNITS[found[2]] if found else None


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    # Ranks that are threads share a GPU, others have one each.
    planned = mebibytes(r"GPU memory of \d+ ranks:", text) or mebibytes("planned peak memory:", text)
    measured = mebibytes("peak memory max", text)
    if planned is None or measured is None or abs(planned / measured - 1) > TOLERANCE:
        sys.exit(f"{sys.argv[1]}: {planned} MiB planned, {measured} MiB measured")
    print(f"{planned} MiB planned, {measured} MiB measured")


if __name__ == "__main__":
    main()
