"""Parses the machine code of each kernel from the output of `cuobjdump -sass`."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

CODE_FOR = re.compile(r"^\s*code for (sm_\d+\w*)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)")
WIDTH = re.compile(r"\.[US]?(8|16|32|64|128|256)(?=\.|$)")

LOCAL_ACCESSES = ("LDL", "STL")
# Tensor-core instructions of warps, and of warpgroups.
MMA = ("HMMA", "HGMMA")
# Accesses of memory that the compiler does not know to be global or shared.
GENERIC_ACCESSES = ("LD", "ST")


class UnreadableCode(Exception):
    """The output does not have the format of the pinned cuobjdump."""


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str
    operands: str

    def name(self) -> str:
        return self.opcode.partition(".")[0]

    def width(self) -> int:
        """Returns the bytes that a load or store moves per thread."""
        match = WIDTH.search(self.opcode)
        return int(match[1]) // 8 if match else 4


@dataclass(frozen=True)
class Code:
    """The instructions of one kernel on one architecture."""

    kernel: str
    arch: str
    instructions: tuple[Instruction, ...]

    def widest(self, name: str) -> int:
        """Returns the bytes per thread of the widest such access, 0 if there is none."""
        return max((each.width() for each in self.instructions if each.name() == name), default=0)

    def count(self, *names: str) -> int:
        return sum(each.name() in names for each in self.instructions)

    def loop_with(self, *names: str) -> list[Instruction]:
        """Returns the longest loop with one of these instructions, empty if there is none."""
        loops = ([each for each in self.instructions if first <= each.address <= last] for first, last in self._loops())
        return max((loop for loop in loops if any(each.name() in names for each in loop)), key=len, default=[])

    def _loops(self):
        """Backward branches, as first and last address. The endless loop after the end is a branch to itself."""
        for each in self.instructions:
            target = TARGET.search(each.operands) if each.name() == "BRA" else None
            if target and int(target[1], 16) < each.address:
                yield int(target[1], 16), each.address


def disassemble(cuda_home: Path, fatbin: str) -> str:
    """Returns the machine code of all kernels for all architectures as text."""
    environment = {"PATH": str(cuda_home / "bin")}  # where cuobjdump finds nvdisasm
    command = [cuda_home / "bin/cuobjdump", "-sass", fatbin]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise UnreadableCode(f"cuobjdump refuses the kernels:\n{done.stdout}{done.stderr}")
    return done.stdout


def parse(text: str) -> list[Code]:
    """Parses a listing: the instructions of each kernel of each architecture."""
    codes: list[tuple[str, str, list[Instruction]]] = []
    arch = None
    for line in text.splitlines():
        if match := CODE_FOR.match(line):
            arch = match[1]
        elif match := FUNCTION.match(line):
            if arch is None:
                raise UnreadableCode(f"cuobjdump names no architecture of {match[1]}")
            codes.append((match[1], arch, []))
        elif (match := INSTRUCTION.match(line)) and codes:
            codes[-1][2].append(Instruction(int(match["address"], 16), match["opcode"], match["operands"]))
    if not codes or not all(instructions for _, _, instructions in codes):
        raise UnreadableCode(f"cuobjdump lists no instructions:\n{text[:500]}")
    return [Code(kernel, arch, tuple(instructions)) for kernel, arch, instructions in codes]


def errors(codes: dict[str, list[Code]], may_use_local: set[tuple[str, str]], mma_loops: set[str]) -> list[str]:
    """Returns errors: local or generic accesses, and kernels of `mma_loops` without products in a loop."""
    found = []
    for file, of_file in codes.items():
        for code in of_file:
            local = code.count(*LOCAL_ACCESSES)
            if local and (code.kernel, code.arch) not in may_use_local:
                found.append(f"{file}: `{code.kernel}` has {local} accesses of local memory on {code.arch}")
            if generic := code.count(*GENERIC_ACCESSES):
                found.append(f"{file}: `{code.kernel}` has {generic} generic accesses on {code.arch}")
            if code.kernel in mma_loops and not code.loop_with(*MMA):
                found.append(f"{file}: `{code.kernel}` has no {' or '.join(MMA)} in a loop on {code.arch}")
    for kernel in sorted(mma_loops - {code.kernel for of_file in codes.values() for code in of_file}):
        found.append(f"MMA_LOOPS names `{kernel}`, which is no kernel: remove the entry")
    return found
