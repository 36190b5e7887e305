"""Writes C++ files with a faulty kernel for each fault of kernels/cuda/tests/attention_faults.txt, and prints their paths.

    faulty_kernels.py FOLDER

The name of the fault precedes that of the kernel.
"""

import pathlib
import sys

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels/cuda"
HEADERS = ("attention_fused", "attention_fused_wgmma", "attention_fused_backward", "attention_softmax")
BEFORE = ("emulation/emulation.h", "common.cuh", "mma.cuh", "wgmma.cuh", "tma.cuh")
MACROS = ("INSTANTIATE", "PARAMETERS", "OPERANDS")
ONLY = "INSTANTIATE(bf16, bf16, 64)"


def main(folder):
    by_file = {}
    for name, file, wrong_from, wrong_to in faults((KERNELS / "tests/attention_faults.txt").read_text()):
        by_file.setdefault(file, []).append((name, faulty(name, file, wrong_from, wrong_to)))
    for file, kernels in by_file.items():
        text = "".join(f'#include "{header}"\n' for header in BEFORE)
        for name, kernel in kernels:
            text += "".join(f"#undef {macro}\n" for macro in MACROS) + f"namespace {name} {{\n{kernel}\n}}\n"
        path = pathlib.Path(folder) / f"faulty_{file}.cpp"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        print(path)


def faults(text):
    """The name, the file, the right and the wrong text of each fault."""
    for fault in text.split("\n@ ")[1:]:
        head, *lines = fault.splitlines()
        right, wrong = ("\n".join(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
        yield *head.split(), right, wrong


def faulty(name, file, right, wrong):
    """The text of a kernel file and its headers with a fault, and with the name of the fault before that of a kernel."""
    text = (KERNELS / f"{file}.cu").read_text()
    for header in HEADERS:
        content = f"#undef ULYSSES_{header.upper()}_CUH\n" + (KERNELS / f"{header}.cuh").read_text()
        text = text.replace(f'#include "{header}.cuh"', content)
    if text.count(right) != 1:
        sys.exit(f"faulty_kernels.py: the fault {name} needs this text once: {right}")
    text = text.replace(right, wrong)
    for kernel in ("KERNEL(", "KERNEL_OF_THREADS("):
        text = text.replace(f"{kernel}attention_", f"{kernel}{name}_attention_")
    return "\n".join(line for line in text.splitlines() if not line.startswith("INSTANTIATE(") or line == ONLY)


main(sys.argv[1])
