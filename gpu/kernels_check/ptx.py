"""The inline PTX of the kernels, which no emulation runs: every instruction with its operands, against the PTX ISA."""

import re
import subprocess
from pathlib import Path


def expected() -> set[str]:
    """The statements as the PTX ISA defines the instructions, each behind its C++ function: every operand with its
    constraint and expression, and whether the compiler may move accesses of memory across it."""
    found = {
        # d, a, b: the second source becomes the lower half.
        "round_pair<bf16>: cvt.rn.bf16x2.f32 =r:pair, f:high, f:low;",
        "round_pair<f16>: cvt.rn.f16x2.f32 =r:pair, f:high, f:low;",
        "float_to_bf16: cvt.rn.bf16.f32 =h:y.bits, f:x;",
        "float_to_f16: cvt.rn.f16.f32 =h:y.bits, f:x;",
        "f16_to_float: cvt.f32.f16 =f:y, h:x.bits;",
        "fast_exp2: ex2.approx.ftz.f32 =f:y, f:x;",
        # Elements beyond the source's bytes become 0. `.cg` allows 16 bytes only.
        "cp_async volatile: cp.async.cg.shared.global [r:shared_address(to)], [l:from], 16, r:source_bytes; memory",
        "cp_async volatile: cp.async.ca.shared.global [r:shared_address(to)], [l:from], n:kBytes, r:source_bytes; memory",
        "cp_async_commit volatile: cp.async.commit_group; memory",
        "cp_async_wait volatile: cp.async.wait_group n:kPending; memory",
        "wgmma_fence volatile: wgmma.fence.sync.aligned; memory",
        "wgmma_commit volatile: wgmma.commit_group.sync.aligned; memory",
        "wgmma_wait volatile: wgmma.wait_group.sync.aligned n:kPending; memory",
        "fence_async_proxy volatile: fence.proxy.async.shared::cta; memory",
        "sync_warpgroup volatile: bar.sync r:1 + threadIdx.x / 128, 128; memory",
        "lower_registers volatile: setmaxnreg.dec.sync.aligned.u32 n:kCount;",
        "raise_registers volatile: setmaxnreg.inc.sync.aligned.u32 n:kCount;",
        "mbarrier_init volatile: mbarrier.init.shared::cta.b64 [r:shared_address(barrier)], r:count; memory",
        "mbarrier_arrive volatile: mbarrier.arrive.shared::cta.b64 _, [r:shared_address(barrier)]; memory",
        "mbarrier_arrive_expect_tx volatile: mbarrier.arrive.expect_tx.shared::cta.b64 _, "
        "[r:shared_address(barrier)], r:bytes; memory",
        "mbarrier_wait volatile: { .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [r:address], r:phase % 2; "
        "selp.u32 =r:is_complete, 1, 0, p; } memory",
        "mbarrier_wait volatile: st.global.u32 [l:u64{0}], r:0; memory",
        # Coordinates from the innermost dimension outwards.
        "tma_copy volatile: cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[r:shared_address(to)], [l:&tensor, {r:column, r:head, r:row, r:sequence}], [r:shared_address(barrier)]; memory",
        "nanoseconds volatile: mov.u64 =l:now, %globaltimer;",
        "pin volatile: memory",
    }
    for count in (1, 2, 4):
        registers = _list("=r:to[{}]", count)
        for transposed in ("", ".trans"):
            instruction = f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {registers}, [r:from];"
            found.add(f"ldmatrix volatile: {instruction} memory")
    a = _list("r:a[{}]", 4)
    for dtype in ("bf16", "f16"):
        c = _list("+f:c[{}]", 4)
        # A in rows, B in columns; the sum is added to c.
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
        found.add(f"mma_m16n8k16<{dtype}> volatile: {mma} {c}, {a}, {_list('r:b[{}]', 2)}, {c};")
        for n in (64, 128):
            product = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
            c = "{" + ", ".join(f"+f:c[{i // 4}][{i % 4}]" for i in range(n // 2)) + "}"
            # imm-scale-a and -b; then imm-trans-a and -b, which are 0 if elements along k are adjacent.
            found.add(
                f"wgmma<{dtype}, {n}> volatile: {{ .reg .pred p; setp.ne.b32 p, r:static_cast<u32>(accumulate), 0; "
                f"{product} {c}, l:a, l:b, p, 1, 1, 0, 0; }}"
            )
            # A is in registers: scale-d, imm-scale-a and -b, and imm-trans-b, because the rows of B are along k.
            found.add(f"wgmma<{dtype}, {n}> volatile: {product} {c}, {a}, l:b, 1, 1, 1, 1;")
    return found


def _list(operand: str, count: int) -> str:
    return "{" + ", ".join(operand.format(i) for i in range(count)) + "}"


FUNCTION_OR_STATEMENT = re.compile(r"__forceinline__\s+\w+\s+(\w+(?:<[^<>]*>)?)\(|\basm(\s+volatile)?\s*\(")


def statements(folder: Path, kernel: str) -> set[str]:
    """The statements of a kernel file and its headers, as `expected` writes them."""
    command = ["cc", "-E", "-P", "-x", "c++", folder / kernel]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, function = set(), ""
    for start in FUNCTION_OR_STATEMENT.finditer(text):
        if start[1]:
            function = start[1]
        else:
            kind = " volatile" if start[2] else ""
            found.add(f"{function}{kind}: {_substituted(_parts(text, start.end()))}")
    return found


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
    memory = " memory" if "memory" in "".join(parts[3:]) else ""
    return re.sub(r"\s+", " ", named + memory).strip()


def _split(operands: str) -> list[str]:
    """One text for each operand: they begin with a constraint."""
    return [one for one in re.split(r',\s*(?=")', operands.strip()) if one]


def _expression(operand: str) -> str:
    constraint, expression = re.fullmatch(r'\s*"([^"]*)"\s*\((.*)\)\s*', operand, re.DOTALL).groups()
    return f"{constraint}:" + re.sub(r"\s+", " ", expression).strip()
