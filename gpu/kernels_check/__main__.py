"""Compiles every CUDA kernel without a GPU and checks its resources: `just kernels-check [--write]`.

Each `kernels/cuda/*.cu` must compile for its architectures with nvcc and with NVRTC (13.0 and 12.4) without a warning. No
kernel may keep anything in local memory: a stack frame, spilled registers, or any access of it in the machine
code; and none may have generic accesses there. The table in `gpu/kernels.md` must be the one that comes out of this run; `--write` puts it there.
With the table is a hash of the kernels and of these tools: `--is-current` only says whether it is still the same.
"""

import argparse
import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels_check import fused, ptxas, sass, table
from kernels_check.compilers import CompileError, nvcc_outputs, nvrtcs
from kernels_check.ptxas import Usage
from kernels_check.sass import Code

REPOSITORY = Path(__file__).resolve().parents[2]

# Kernels that may use local memory, as (kernel, architecture), with the reason.
MAY_USE_LOCAL_MEMORY: dict[tuple[str, str], str] = {}

# Kernels that must have a loop with tensor-core instructions.
MMA_LOOPS = {
    f"attention_fused_{kernel}_{dtype}_{head_dim}"
    for kernel in ("forward", "backward_keys", "backward_queries")
    for dtype in ("bf16", "f16")
    for head_dim in (64, 96, 128)
} | {
    f"attention_fused_{kernel}_{dtype}_{head_dim}"
    for kernel in ("forward_wgmma", "backward_wgmma_keys", "backward_wgmma_queries")
    for dtype in ("bf16", "f16")
    for head_dim in (64, 128)
}


def toolchain() -> Path:
    """Returns the folder of the pinned compilers, fetched if missing."""
    done = subprocess.run([REPOSITORY / "gpu/toolchain.sh"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("kernels-check: the CUDA compilers are missing (see above)")
    return Path(done.stdout.strip())


def compile_all(cuda_home: Path, sources: list[Path]) -> tuple[dict[str, list[Usage]], dict[str, list[Code]]]:
    """Returns the resources and the machine code of every kernel, by file name."""
    compilers = nvrtcs(cuda_home)

    def compile_one(source: Path) -> tuple[list[Usage], list[Code]]:
        for nvrtc in compilers:
            nvrtc.compile(source)
        report, code = nvcc_outputs(cuda_home, source)
        return ptxas.parse(report), sass.parse(code)

    with ThreadPoolExecutor() as pool:
        compiled = dict(zip((source.name for source in sources), pool.map(compile_one, sources)))
    usages = {file: usage for file, (usage, _) in compiled.items()}
    return usages, {file: code for file, (_, code) in compiled.items()}


def local_memory_errors(usages: dict[str, list[Usage]], may: dict[tuple[str, str], str]) -> list[str]:
    """Returns errors: kernels with disallowed local memory, and unused exceptions."""
    errors = []
    using = set()
    for file, of_file in usages.items():
        for usage in filter(Usage.uses_local_memory, of_file):
            using.add((usage.kernel, usage.arch))
            if (usage.kernel, usage.arch) in may:
                continue
            if usage.spills():
                what = "spills registers"
                amount = f"{usage.spill_stores} bytes of stores, {usage.spill_loads} bytes of loads"
            else:
                what, amount = "has a stack frame", f"{usage.stack} bytes"
            errors.append(f"{file}: `{usage.kernel}` {what} on {usage.arch}: {amount}")
    for kernel, arch in may.keys() - using:
        errors.append(f"MAY_USE_LOCAL_MEMORY names `{kernel}` on {arch}, which uses none: remove the entry")
    return errors


def stamp() -> str:
    """The line of the table with the hash of all that it depends on."""
    tools = [*(REPOSITORY / "gpu/kernels_check").glob("*.py"), REPOSITORY / "gpu/requirements.txt"]
    contents = hashlib.sha256()
    for path in sorted([*(REPOSITORY / "kernels/cuda").glob("*.cu*"), *tools]):
        contents.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return f"<!-- sources: {contents.hexdigest()[:16]} -->\n"


def table_errors(document: Path, current: str, write: bool) -> list[str]:
    """Checks that the document's table is current, or updates it with `write`."""
    text = document.read_text()
    if table.split(text)[1] == current:
        return []
    if write:
        document.write_text(table.replaced(text, current))
        return []
    return [f"the table in {document} is not that of the kernels: run `just kernels-check --write`"]


def check(
    cuda_home: Path,
    kernels: Path,
    document: Path,
    write: bool = False,
    mma_loops: frozenset[str] | set[str] = frozenset(),
    first_line: str = "",
) -> list[str]:
    """Runs all checks, prints the table, and returns the errors."""
    sources = sorted(kernels.glob("*.cu"))
    if not sources:
        return [f"there is no kernel in {kernels}"]
    try:
        usages, codes = compile_all(cuda_home, sources)
        flat = [[one for of_file in by_file.values() for one in of_file] for by_file in (usages, codes)]
        current = f"{first_line}{fused.render(*flat)}\n\n{table.render(usages, codes)}"
        print(current)
        return [
            *local_memory_errors(usages, MAY_USE_LOCAL_MEMORY),
            *sass.errors(codes, set(MAY_USE_LOCAL_MEMORY), mma_loops),
            *table_errors(document, current, write),
        ]
    except (CompileError, ptxas.UnreadableReport, sass.UnreadableCode, table.NoMarkers) as error:
        return [str(error)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="kernels-check", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table to gpu/kernels.md")
    parser.add_argument("--is-current", action="store_true", help="say whether it is that of these kernels and tools")
    arguments = parser.parse_args()
    document = REPOSITORY / "gpu/kernels.md"
    if arguments.is_current:
        sys.exit(0 if stamp() in document.read_text() else 1)
    errors = check(toolchain(), REPOSITORY / "kernels/cuda", document, arguments.write, MMA_LOOPS, stamp())
    for error in errors:
        print(f"kernels-check: {error}", file=sys.stderr)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
