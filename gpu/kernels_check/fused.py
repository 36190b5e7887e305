"""The table of the fused attention kernels: occupancy, and the instructions of their loop over tiles."""

import re
from collections import Counter

from kernels_check.ptxas import Usage
from kernels_check.sass import MMA, Code

NAME = re.compile(r"attention_fused_(?P<kernel>\w+)_bf16_(?P<head_dim>\d+)")

# Rows of dynamic shared memory of a block, of `head_dim` 16-bit elements, with further bytes, and its threads: the
# launches in `kernels/src/attention/fused`.
SHARED = {
    "forward": (256, 0),
    "forward_wgmma": (640, 64),
    "backward_keys": (256, 2048),
    "backward_queries": (256, 2048),
    "backward_wgmma_keys": (640, 5168),
    "backward_wgmma_queries": (640, 2144),
}
# Those of kernels that have other tiles at a head dimension.
SHARED_OF_HEAD_DIM = {("backward_wgmma_queries", 64): (1024, 2144)}
THREADS = {kernel: 384 if "wgmma" in kernel else 128 for kernel in SHARED}

# Limits of a multiprocessor ("Compute Capabilities" in the CUDA programming guide).
SHARED_PER_MULTIPROCESSOR = {"80": 164 << 10, "90": 228 << 10, "90a": 228 << 10, "100": 228 << 10}
RESERVED_PER_BLOCK = 1 << 10
REGISTERS = 64 << 10
# Registers are allocated to warps in units of this number.
REGISTER_UNIT = 256
WARPS = 64

# Columns of instructions, by the first part of their name; the rest are counted together.
COLUMNS = {
    "HMMA / HGMMA": MMA,
    "LDSM": ("LDSM",),
    "LDGSTS": ("LDGSTS",),
    "MUFU": ("MUFU",),
    "FP32": ("FFMA", "FMUL", "FADD", "FMNMX", "FMNMX3", "FFMA2", "FMUL2", "FADD2"),
}


def shared_bytes(kernel: str, head_dim: int) -> int:
    """Returns the dynamic shared memory of a block."""
    rows, more = SHARED_OF_HEAD_DIM.get((kernel, head_dim), SHARED[kernel])
    return rows * head_dim * 2 + more


def blocks(registers: int, shared: int, threads: int, arch: str) -> int:
    """Returns the blocks that fit a multiprocessor at a time."""
    warps = threads // 32
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // (per_warp * warps)
    by_shared = SHARED_PER_MULTIPROCESSOR[arch] // (shared + RESERVED_PER_BLOCK)
    return min(by_registers, by_shared, WARPS // warps)


def mix(code: Code) -> list[int]:
    """Returns the instructions in the text of the loop over tiles, by column, then all others."""
    names = Counter(each.name() for each in code.loop_with(*MMA))
    counts = [sum(names[one] for one in column) for column in COLUMNS.values()]
    return [*counts, names.total() - sum(counts)]


def render(usages: list[Usage], codes: list[Code]) -> str:
    """Returns a row for each fused kernel in bf16 and architecture."""
    header = " | ".join(["shared memory", "arch", "registers", "blocks", "occupancy", *COLUMNS, "others"])
    lines = [f"| kernel | head_dim | {header} |", "|---|---:|---:|---|" + "---:|" * (4 + len(COLUMNS))]
    code_of = {(code.kernel, code.arch): code for code in codes}
    fused = [(match, usage) for usage in usages if (match := NAME.fullmatch(usage.kernel))]
    for match, usage in sorted(fused, key=_order):
        kernel, head_dim, arch = match["kernel"], int(match["head_dim"]), usage.arch.removeprefix("sm_")
        shared = shared_bytes(kernel, head_dim)
        threads = THREADS[kernel]
        resident = blocks(usage.registers, shared, threads, arch)
        occupancy = f"{100 * resident * threads // 32 / WARPS:.0f} %"
        cells = [kernel, head_dim, f"{shared >> 10} KiB", usage.arch, usage.registers, resident, occupancy]
        cells += mix(code_of[usage.kernel, usage.arch])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _order(row: tuple[re.Match, Usage]) -> tuple[str, int, int]:
    match, usage = row
    return match["kernel"], int(match["head_dim"]), int(usage.arch.removeprefix("sm_").removesuffix("a"))
