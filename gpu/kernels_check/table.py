"""The table of registers and shared memory, and its copy in `docs/gpu.md`."""

from kernels_check.compilers import ARCHITECTURES
from kernels_check.ptxas import Usage

BEGIN = "<!-- kernels-check: begin -->"
END = "<!-- kernels-check: end -->"


class NoMarkers(Exception):
    """The document has no markers for the table."""


def render(usages: dict[str, list[Usage]]) -> str:
    """Returns one row per kernel of every file; a cell is registers per thread / static shared bytes per block."""
    header = " | ".join(f"sm_{arch}" for arch in ARCHITECTURES)
    lines = [f"| file | kernel | {header} |", "|---|---" + "|---:" * len(ARCHITECTURES) + "|"]
    for file in sorted(usages):
        cells = {(usage.kernel, usage.arch): _cell(usage) for usage in usages[file]}
        for kernel in sorted({usage.kernel for usage in usages[file]}):
            row = " | ".join(cells[kernel, f"sm_{arch}"] for arch in ARCHITECTURES)
            lines.append(f"| `{file}` | `{kernel}` | {row} |")
    return "\n".join(lines)


def _cell(usage: Usage) -> str:
    stack = f" / {usage.stack} stack" if usage.stack else ""
    return f"{usage.registers} / {usage.shared}{stack}"


def split(document: str) -> tuple[str, str, str]:
    """Splits the document into the text before the table, the table, and the text after it."""
    before, begin, rest = document.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise NoMarkers(f"there is no `{BEGIN}` … `{END}` to put the table between")
    return before, table.strip("\n"), after


def replaced(document: str, table: str) -> str:
    """Returns the document with this table between its markers."""
    before, _, after = split(document)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
