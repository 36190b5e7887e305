"""The table of registers, shared memory and widths of accesses, and its copy in `gpu/kernels.md`."""

from kernels_check.compilers import ARCHITECTURES
from kernels_check.ptxas import Usage
from kernels_check.sass import Code

# Widest accesses in the table: of global memory, then of shared memory.
ACCESSES = ("LDG", "STG", "LDS", "STS")

BEGIN = "<!-- kernels-check: begin -->"
END = "<!-- kernels-check: end -->"


class NoMarkers(Exception):
    """The document has no markers for the table."""


def render(usages: dict[str, list[Usage]], codes: dict[str, list[Code]]) -> str:
    """Returns one row per kernel of every file: registers per thread / static shared bytes per block for every
    architecture (sm_90a in the column of sm_90), then the bytes per thread of the widest accesses."""
    header = " | ".join([*(f"sm_{arch}" for arch in ARCHITECTURES), " / ".join(ACCESSES)])
    lines = [f"| file | kernel | {header} |", "|---|---" + "|---:" * (len(ARCHITECTURES) + 1) + "|"]
    for file in sorted(usages):
        cells = {(usage.kernel, usage.arch.removesuffix("a")): _cell(usage) for usage in usages[file]}
        for kernel in sorted({usage.kernel for usage in usages[file]}):
            row = " | ".join(cells.get((kernel, f"sm_{arch}"), "–") for arch in ARCHITECTURES)
            widths = _widths([code for code in codes[file] if code.kernel == kernel])
            lines.append(f"| `{file}` | `{kernel}` | {row} | {widths} |")
    return "\n".join(lines)


def _cell(usage: Usage) -> str:
    stack = f" / {usage.stack} stack" if usage.stack else ""
    return f"{usage.registers} / {usage.shared}{stack}"


def _widths(codes: list[Code]) -> str:
    """The widest accesses on the architecture where they are narrowest; – for none."""
    widths = (min(code.widest(access) for code in codes) for access in ACCESSES)
    return " / ".join(str(width) if width else "–" for width in widths)


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
