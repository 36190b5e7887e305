"""Compiles every CUDA kernel without a GPU and checks its resources: `just kernels-check [--write]`.

Each `kernels/cuda/*.cu` must compile for all architectures with nvcc and with NVRTC without a warning, and
no kernel may keep anything in local memory: a stack frame or spilled registers. The table of registers in `docs/gpu.md` must be the one that comes out
of this run; `--write` puts it there.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels_check import ptxas, table
from kernels_check.compilers import CompileError, Nvrtc, nvcc_report
from kernels_check.ptxas import Usage

REPOSITORY = Path(__file__).resolve().parents[2]

# Kernels that may use local memory, as (kernel, architecture), with the reason.
MAY_USE_LOCAL_MEMORY: dict[tuple[str, str], str] = {}


def toolchain() -> Path:
    """Returns the folder of the pinned compilers, fetched if missing."""
    done = subprocess.run([REPOSITORY / "gpu/toolchain.sh"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("kernels-check: the CUDA compilers are missing (see above)")
    return Path(done.stdout.strip())


def compile_all(cuda_home: Path, sources: list[Path]) -> dict[str, list[Usage]]:
    """Returns the resources of every kernel, by file name."""
    nvrtc = Nvrtc(cuda_home)

    def compile_one(source: Path) -> list[Usage]:
        nvrtc.compile(source)
        return ptxas.parse(nvcc_report(cuda_home, source))

    with ThreadPoolExecutor() as pool:
        return dict(zip((source.name for source in sources), pool.map(compile_one, sources)))


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


def table_errors(document: Path, current: str, write: bool) -> list[str]:
    """Checks that the document's table is current, or updates it with `write`."""
    text = document.read_text()
    if table.split(text)[1] == current:
        return []
    if write:
        document.write_text(table.replaced(text, current))
        return []
    return [f"the table in {document} is not that of the kernels: run `just kernels-check --write`"]


def check(cuda_home: Path, kernels: Path, document: Path, write: bool = False) -> list[str]:
    """Runs all checks, prints the table, and returns the errors."""
    sources = sorted(kernels.glob("*.cu"))
    if not sources:
        return [f"there is no kernel in {kernels}"]
    try:
        usages = compile_all(cuda_home, sources)
        current = table.render(usages)
        print(current)
        return local_memory_errors(usages, MAY_USE_LOCAL_MEMORY) + table_errors(document, current, write)
    except (CompileError, ptxas.UnreadableReport, table.NoMarkers) as error:
        return [str(error)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="kernels-check", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table of registers to docs/gpu.md")
    arguments = parser.parse_args()
    errors = check(toolchain(), REPOSITORY / "kernels/cuda", REPOSITORY / "docs/gpu.md", arguments.write)
    for error in errors:
        print(f"kernels-check: {error}", file=sys.stderr)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
