"""The inline PTX of the kernels, which no emulation runs: every instruction with its operands, against the PTX ISA."""

import re
import subprocess
from pathlib import Path

FRAGMENT = [f"to[{i}]" for i in range(4)]


def expected() -> set[str]:
    """The statements as the PTX ISA defines the instructions, each with the C++ expressions of its operands."""
    found = {
        # d, a: the second source becomes the lower half.
        "cvt.rn.bf16x2.f32 pair, high, low;",
        "cvt.rn.f16x2.f32 pair, high, low;",
        "cvt.rn.bf16.f32 y.bits, x;",
        "cvt.rn.f16.f32 y.bits, x;",
        "cvt.f32.f16 y, x.bits;",
        "ex2.approx.ftz.f32 y, x;",
        # Elements beyond the source's bytes become 0. `.cg` allows 16 bytes only.
        "cp.async.cg.shared.global [shared_address(to)], [from], 16, source_bytes;",
        "cp.async.ca.shared.global [shared_address(to)], [from], kBytes, source_bytes;",
        "cp.async.commit_group;",
        "cp.async.wait_group kPending;",
        "wgmma.fence.sync.aligned;",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned kPending;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 1 + threadIdx.x / 128, 128;",
        "setmaxnreg.dec.sync.aligned.u32 kCount;",
        "setmaxnreg.inc.sync.aligned.u32 kCount;",
        "mbarrier.init.shared::cta.b64 [shared_address(barrier)], count;",
        "mbarrier.arrive.shared::cta.b64 _, [shared_address(barrier)];",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [shared_address(barrier)], bytes;",
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [address], phase % 2; selp.u32 is_complete, 1, 0, p; }",
        # Coordinates from the innermost dimension outwards.
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [shared_address(to)], "
        "[&tensor, {column, head, row, sequence}], [shared_address(barrier)];",
        "mov.u64 now, %globaltimer;",
        "st.global.u32 [u64{0}], 0;",
        "",  # Keeps registers in place.
    }
    for count in (1, 2, 4):
        registers = ", ".join(FRAGMENT[:count])
        for transposed in ("", ".trans"):
            found.add(f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [from];")
    for dtype in ("bf16", "f16"):
        c, a = (", ".join(f"{name}[{i}]" for i in range(4)) for name in "ca")
        # A in rows, B in columns; the sum is added to c.
        found.add(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{{c}}}, {{{a}}}, {{b[0], b[1]}}, {{{c}}};"
        )
        for n in (64, 128):
            product = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
            c = ", ".join(f"c[{i // 4}][{i % 4}]" for i in range(n // 2))
            # imm-scale-a and -b; then imm-trans-a and -b, which are 0 if elements along k are adjacent.
            found.add(
                f"{{ .reg .pred p; setp.ne.b32 p, static_cast<u32>(accumulate), 0; {product} {{{c}}}, a, b, p, 1, 1, 0, 0; }}"
            )
            # A is in registers: scale-d, imm-scale-a and -b, and imm-trans-b, because the rows of B are along k.
            found.add(f"{product} {{{c}}}, {{{a}}}, b, 1, 1, 1, 1;")
    return found


def statements(folder: Path, kernel: str) -> set[str]:
    """The statements of a kernel file and its headers, with each operand's expression in place of its number."""
    command = ["cc", "-E", "-P", "-x", "c++", folder / kernel]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    starts = re.finditer(r"\basm\s*(?:volatile\s*)?\(", text)
    return {_substituted(_parts(text, start.end())) for start in starts}


def _parts(text: str, at: int) -> list[str]:
    """The parts of the statement whose parenthesis has been opened: its text, outputs, inputs, what it clobbers."""
    parts, depth, quoted = [""], 0, False
    while depth >= 0:
        char = text[at]
        if char == '"' and text[at - 1] != "\\":
            quoted = not quoted
        depth += 0 if quoted else (char in "([{") - (char in ")]}")
        if char == ":" and depth == 0 and not quoted:
            parts.append("")
        elif depth >= 0:
            parts[-1] += char
        at += 1
    return parts


def _substituted(parts: list[str]) -> str:
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts[0])).replace("\\n", " ")
    operands = [_expression(one) for part in parts[1:3] for one in _split(part)]
    named = re.sub(r"%(%|\d+)", lambda match: "%" if match[1] == "%" else operands[int(match[1])], template)
    return re.sub(r"\s+", " ", named).strip()


def _split(operands: str) -> list[str]:
    """One text for each operand: they begin with a constraint."""
    return [one for one in re.split(r',\s*(?=")', operands.strip()) if one]


def _expression(operand: str) -> str:
    match = re.fullmatch(r'\s*"[^"]*"\s*\((.*)\)\s*', operand, re.DOTALL)
    return re.sub(r"\s+", " ", match[1]).strip()
