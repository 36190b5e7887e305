"""Tests of the kernels check on reports and kernels that violate its rules."""

import io
import itertools
import re
import shutil
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path

from kernels_check import fused, ptx, ptxas, sass, table
from kernels_check.__main__ import REPOSITORY, check, local_memory_errors, toolchain
from kernels_check.compilers import CompileError, nvcc_outputs
from kernels_check.ptxas import Usage

REPORT = """\
ptxas info    : 24 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function 'copies' for 'sm_80'
ptxas info    : Function properties for copies
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 21 registers, used 0 barriers, 368 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 16.646 ms
ptxas info    : Compiling entry function 'sums' for 'sm_90'
ptxas info    : Function properties for sums
    224 bytes stack frame, 240 bytes spill stores, 248 bytes spill loads
ptxas info    : Function properties for not_inlined
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 240 bytes cumulative stack size, 128 bytes smem, 368 bytes cmem[0]
"""

COPIES = """\
#include "common.cuh"
extern "C" __global__ void copies(float* out, const float* in) { out[threadIdx.x] = twice(in[threadIdx.x]); }
"""
COMMON = "__device__ __forceinline__ float twice(float x) { return 2.0f * x; }\n"

# 64 live values in each of 2048 threads of a multiprocessor, which has 32 registers per thread.
SPILLS = """\
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* out, const float* in) {
    float r[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) r[i] = in[i * 1024 + threadIdx.x];
#pragma unroll
    for (int i = 0; i < 256; ++i) r[i & 63] = r[i & 63] * r[(i * 7 + 3) & 63];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = r[i];
}
"""

DOCUMENT = f"Before.\n\n{table.BEGIN}\n{table.END}\n\nAfter.\n"


class Reports(unittest.TestCase):
    def test_a_report_is_read_per_kernel_and_architecture(self):
        copies, sums = ptxas.parse(REPORT)
        self.assertEqual(copies, Usage("copies", "sm_80", 21, 0, 0, 0, 0))
        self.assertEqual((sums.kernel, sums.arch, sums.registers, sums.shared), ("sums", "sm_90", 32, 128))

    def test_what_functions_that_were_not_inlined_spill_is_the_kernels(self):
        sums = ptxas.parse(REPORT)[1]
        self.assertEqual((sums.stack, sums.spill_stores, sums.spill_loads), (240, 244, 256))

    def test_a_report_without_kernels_or_without_spills_said_is_refused(self):
        for report in ("", REPORT.replace("spill stores", "spilled"), REPORT.replace("registers", "regs")):
            with self.assertRaises(ptxas.UnreadableReport):
                ptxas.parse(report)


class LocalMemory(unittest.TestCase):
    def test_a_spill_is_an_error_unless_it_is_allowed_for_that_architecture(self):
        usages = {"sum.cu": ptxas.parse(REPORT)}
        self.assertIn("sum.cu: `sums` spills registers on sm_90", local_memory_errors(usages, {})[0])
        self.assertEqual(local_memory_errors(usages, {("sums", "sm_90"): "reason"}), [])
        self.assertEqual(len(local_memory_errors(usages, {("sums", "sm_80"): "reason"})), 2)

    def test_a_stack_frame_without_spills_is_an_error_too(self):
        usages = {"copy.cu": [Usage("copies", "sm_90", 21, 0, 32, 0, 0)]}
        self.assertIn("copy.cu: `copies` has a stack frame on sm_90: 32 bytes", local_memory_errors(usages, {})[0])
        self.assertEqual(local_memory_errors(usages, {("copies", "sm_90"): "reason"}), [])

    def test_leave_to_spill_that_nothing_needs_is_an_error(self):
        usages = {"copy.cu": ptxas.parse(REPORT)[:1]}
        self.assertIn("remove the entry", local_memory_errors(usages, {("copies", "sm_80"): "reason"})[0])

    def test_one_direction_is_enough_to_be_a_spill(self):
        self.assertTrue(Usage("k", "sm_80", 1, 0, 0, 4, 0).spills())
        self.assertTrue(Usage("k", "sm_80", 1, 0, 0, 0, 4).spills())


LISTING = """\
	code for sm_90
		Function : products
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;    /* 0x0000000402047981 */
                                                                                /* 0x000fe200078e00ff */
        /*0010*/              @!P0 BRA 0x80 ;                                   /* 0x0000000000708947 */
        /*0020*/                   HMMA.16816.F32.BF16 R16, R24.reuse, R32, R16 ;
        /*0030*/               @P1 BRA 0x20 ;
        /*0040*/                   STG.E.U16 desc[UR4][R2.64], R7 ;
        /*0050*/                   STG.E desc[UR4][R2.64], R7 ;
        /*0060*/               @P0 BRA 0x10 ;
        /*0070*/                   BRA 0x70;
		Function : sums
        /*0000*/                   LDS.64 R4, [R2] ;
        /*0010*/                   STL [R1], R4 ;
        /*0020*/                   HMMA.16816.F32 R16, R24, R32, R16 ;
        /*0030*/                   EXIT ;
"""


class MachineCode(unittest.TestCase):
    def test_the_widest_access_of_a_kind_is_found(self):
        products, sums = sass.parse(LISTING)
        self.assertEqual([products.widest(name) for name in ("LDG", "STG", "LDS")], [16, 4, 0])
        self.assertEqual((products.arch, sums.kernel, sums.widest("LDS")), ("sm_90", "sums", 8))

    def test_accesses_of_local_memory_are_errors_unless_allowed(self):
        codes = {"made_up.cu": sass.parse(LISTING)}
        self.assertEqual(sass.errors(codes, set(), set()), ["made_up.cu: `sums` has 1 accesses of local memory on sm_90"])
        self.assertEqual(sass.errors(codes, {("sums", "sm_90")}, set()), [])

    def test_generic_accesses_are_errors(self):
        codes = {"made_up.cu": sass.parse(LISTING.replace("STG.E.U16", "ST.E.U16"))}
        errors = sass.errors(codes, {("sums", "sm_90")}, set())
        self.assertEqual(errors, ["made_up.cu: `products` has 1 generic accesses on sm_90"])

    def test_tensor_core_instructions_must_be_in_a_loop(self):
        products, sums = sass.parse(LISTING)
        self.assertEqual([each.address for each in products.loop_with("HMMA")], [0x10, 0x20, 0x30, 0x40, 0x50, 0x60])
        self.assertTrue(products.loop_with("STG"))
        self.assertEqual(products.loop_with("LDG"), [])
        errors = "\n".join(sass.errors({"made_up.cu": [sums]}, {("sums", "sm_90")}, {"sums", "gone"}))
        self.assertIn("`sums` has no HMMA or HGMMA in a loop on sm_90", errors)
        self.assertIn("MMA_LOOPS names `gone`", errors)

    def test_a_listing_without_instructions_is_refused(self):
        for listing in ("", LISTING.replace("/*00", "<00"), LISTING.replace("code for", "code of")):
            with self.assertRaises(sass.UnreadableCode):
                sass.parse(listing)


class Fused(unittest.TestCase):
    def test_registers_shared_memory_or_warps_limit_the_blocks_of_a_multiprocessor(self):
        self.assertEqual(fused.blocks(255, 1024, 128, "80"), 2)
        self.assertEqual(fused.blocks(168, 1024, 128, "80"), 3)
        self.assertEqual(fused.blocks(168, 1024, 256, "90a"), 1)
        self.assertEqual([fused.blocks(32, 66 << 10, 128, arch) for arch in ("80", "90")], [2, 3])
        self.assertEqual(fused.blocks(16, 0, 128, "100"), 16)

    def test_a_kernel_gets_a_row_with_the_instructions_of_its_loop(self):
        kernel = "attention_fused_forward_bf16_64"
        row = fused.render([Usage(kernel, "sm_90", 200, 0, 0, 0, 0)], sass.parse(LISTING.replace("products", kernel)))
        self.assertEqual(
            row.splitlines()[2], "| forward | 64 | 32 KiB | sm_90 | 200 | 2 | 12 % | 1 | 0 | 0 | 0 | 0 | 5 |"
        )


class Tables(unittest.TestCase):
    def test_a_table_is_replaced_between_its_markers_only(self):
        document = table.replaced(DOCUMENT, "| a |")
        self.assertEqual(table.split(document)[1], "| a |")
        self.assertTrue(document.startswith("Before.") and document.endswith("After.\n"))
        self.assertEqual(table.replaced(document, "| a |"), document)

    def test_a_document_without_both_markers_is_refused(self):
        for document in ("", table.BEGIN, table.END):
            with self.assertRaises(table.NoMarkers):
                table.split(document)


class Kernels(unittest.TestCase):
    """Runs the pinned compilers on test kernels."""

    @classmethod
    def setUpClass(cls):
        cls.cuda_home = toolchain()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.kernels = Path(folder.name)
        self.document = self.kernels / "gpu.md"
        self.document.write_text(DOCUMENT)
        (self.kernels / "common.cuh").write_text(COMMON)

    def check(self, source: str, write: bool = True) -> list[str]:
        (self.kernels / "made_up.cu").write_text(source)
        with redirect_stdout(io.StringIO()):
            return check(self.cuda_home, self.kernels, self.document, write)

    def test_a_clean_kernel_passes_and_gets_a_row_for_all_architectures(self):
        self.assertEqual(self.check(COPIES), [])
        row = next(line for line in self.document.read_text().splitlines() if "`copies`" in line)
        self.assertRegex(row, r"^\| `made_up.cu` \| `copies` (\| [1-9]\d* / 0 ){3}\| 4 / 4 / – / – \|$")

    def test_a_table_that_drifted_is_an_error_until_it_is_written(self):
        self.assertIn("is not that of the kernels", self.check(COPIES, write=False)[0])
        self.assertEqual(self.check(COPIES, write=True), [])
        self.assertEqual(self.check(COPIES, write=False), [])

    def test_a_kernel_that_spills_fails_on_all_architectures(self):
        errors = "\n".join(self.check(SPILLS))
        for arch in ("sm_80", "sm_90", "sm_100"):
            self.assertRegex(errors, rf"made_up.cu: `spills` spills registers on {arch}: [1-9]\d* bytes")
            self.assertRegex(errors, rf"made_up.cu: `spills` has [1-9]\d* accesses of local memory on {arch}")

    def test_a_kernel_that_copies_its_parameter_to_the_stack_fails(self):
        copies = """\
struct Table { unsigned at[64]; };
__device__ __noinline__ unsigned of(const Table &table, unsigned i) { return table.at[i]; }
extern "C" __global__ void copies(unsigned* out, const Table table) { out[threadIdx.x] = of(table, threadIdx.x); }
"""
        errors = "\n".join(self.check(copies))
        self.assertRegex(errors, r"made_up.cu: `copies` has a stack frame on sm_90: [1-9]\d* bytes")
        in_place = self.check(copies.replace("const Table table", "const __grid_constant__ Table table"))
        self.assertNotRegex("\n".join(in_place), "stack frame|local memory")

    def test_tensor_core_instructions_compile_to_what_they_are_named_after(self):
        for name in ("common.cuh", "mma.cuh", "attention_fused.cuh", "attention_fused_backward.cuh", "tests/mma.cu"):
            shutil.copy(REPOSITORY / "kernels/cuda" / name, self.kernels)
        with redirect_stdout(io.StringIO()):
            errors = check(self.cuda_home, self.kernels, self.document, True, {"test_matmul_bf16", "test_matmul_f16"})
        self.assertEqual(errors, [])
        _, code = nvcc_outputs(self.cuda_home, self.kernels / "mma.cu")
        codes = {code.kernel: code for code in sass.parse(code) if code.arch == "sm_90"}
        opcodes = {kernel: {each.opcode for each in code.instructions} for kernel, code in codes.items()}
        self.assertIn("HMMA.16816.F32.BF16", opcodes["test_mma_bf16"])
        self.assertIn("HMMA.16816.F32", opcodes["test_mma_f16"])
        for kernel, opcode in (("x1", "M88"), ("x2", "M88.2"), ("x4", "M88.4"), ("x4_trans", "MT88.4")):
            self.assertIn(f"LDSM.16.{opcode}", opcodes[f"test_ldmatrix_{kernel}"])
        widths = {bytes: codes[f"test_cp_async_{bytes}"].widest("LDGSTS") for bytes in (4, 8, 16)}
        self.assertEqual(widths, {4: 4, 8: 8, 16: 16})

    def test_inline_ptx_is_that_of_the_isa(self):
        kernels = REPOSITORY / "kernels/cuda"
        found = set().union(*(ptx.statements(kernels, path.name) for path in kernels.glob("*.cu")))
        self.assertEqual(found, ptx.expected())

    def test_wrong_inline_ptx_fails(self):
        for header, kernel, right, wrong in (
            ("tma.cuh", "attention_fused_forward_wgmma.cu", '"r"(column), "r"(head)', '"r"(head), "r"(column)'),
            ("wgmma.cuh", "attention_fused_forward_wgmma.cu", "1, 1, 1, 1;", "1, 1, 1, 0;"),
            ("wgmma.cuh", "attention_fused_backward_wgmma.cu", "p, 1, 1, 0, 0;", "p, 1, 1, 0, 1;"),
            ("attention_fused.cuh", "attention_fused_forward.cu", '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
            ("mma.cuh", "attention_fused_forward.cu", "x4.trans", "x4"),
            ("mma.cuh", "attention_fused_forward.cu", '"+f"(c[0])', '"=f"(c[0])'),
            ("mma.cuh", "attention_fused_forward.cu", "DEFINE_MMA(bf16, bf16)", "DEFINE_MMA(bf16, f16)"),
            ("wgmma.cuh", "attention_fused_forward_wgmma.cu", "setmaxnreg.dec", "setmaxnreg.inc"),
            ("wgmma.cuh", "attention_fused_forward_wgmma.cu", 'volatile("fence.proxy', '("fence.proxy'),
            ("tma.cuh", "attention_fused_forward_wgmma.cu", '"r"(phase % 2)\n                     : "memory"', '"r"(phase % 2)'),
        ):
            self.copy_wgmma(kernel)
            statements = ptx.statements(self.kernels, kernel)
            text = (self.kernels / header).read_text()
            self.assertIn(right, text)
            (self.kernels / header).write_text(text.replace(right, wrong))
            self.assertNotEqual(ptx.statements(self.kernels, kernel), statements, wrong)

    def copy_wgmma(self, name: str) -> Path:
        for path in [*(REPOSITORY / "kernels/cuda").glob("*.cuh"), REPOSITORY / "kernels/cuda" / name]:
            shutil.copy(path, self.kernels)
        return self.kernels / name

    def loops(self, name: str) -> dict[str, list[str]]:
        """Returns the instructions in the loop over tiles, by kernel."""
        source = self.copy_wgmma(name)
        kernels = set(re.findall(r"    KERNEL\w*\((\w+?)_##", source.read_text()))
        with redirect_stdout(io.StringIO()):
            self.assertEqual(check(self.cuda_home, self.kernels, self.document, True), [])
        for kernel in kernels:
            self.assertRegex(self.document.read_text(), rf"`{kernel}_bf16_128` \| – \| \d+ / 0 \| – \|")
        codes = sass.parse(nvcc_outputs(self.cuda_home, source)[1])
        self.assertEqual({code.arch for code in codes}, {"sm_90a"})
        for code in codes:
            self.assertEqual(code.count("USETMAXREG"), 2, code.kernel)
        return {code.kernel: [each.opcode for each in code.loop_with("HGMMA")] for code in codes}

    def test_products_of_warpgroups_compile_for_their_architecture_and_run_during_the_softmax(self):
        for kernel, loop in self.loops("attention_fused_forward_wgmma.cu").items():
            dtype = ".BF16" if "bf16" in kernel else ""
            self.assertIn(f"HGMMA.64x128x16.F32{dtype}", loop)
            # After the last product, the loop waits for the scores only: exponentials are computed meanwhile.
            last = max(index for index, opcode in enumerate(loop) if opcode.startswith("HGMMA"))
            waits = [index for index, opcode in enumerate(loop) if opcode.startswith("WARPGROUP.DEPBAR")]
            exponentials = [index for index, opcode in enumerate(loop) if opcode == "MUFU.EX2"]
            self.assertEqual([wait > last for wait in waits], [False, True])
            self.assertGreater(min(exponentials), waits[1])

    def test_products_of_backward_run_during_the_exponentials(self):
        loops = self.loops("attention_fused_backward_wgmma.cu")
        self.assertEqual(len(loops), 8)
        for kernel, loop in loops.items():
            of = {"H": "HGMMA", "W": "WARPGROUP.DEPBAR", "E": "MUFU.EX2"}
            kinds = [kind for opcode in loop for kind, prefix in of.items() if opcode.startswith(prefix)]
            order = "".join(kind for kind, _ in itertools.groupby(kinds))
            # The waits before the exponentials leave a product in flight, and so does the end of the loop.
            self.assertEqual(order, "HWHWEWH", kernel)

    def test_products_of_warpgroups_that_ptxas_serializes_fail(self):
        # Products are used before they are waited for.
        for name, wait, use in (
            ("attention_fused_forward_wgmma.cu", "wgmma_wait<1>(scores[0]);\n            ", "shared.keys.release(index);"),
            ("attention_fused_backward_wgmma.cu", "wgmma_wait<0>(dp[0]);\n            ", "shared.values.release(index);"),
        ):
            source = self.copy_wgmma(name)
            text = source.read_text()
            self.assertIn(wait + use, text)
            source.write_text(text.replace(wait + use, use))
            with self.assertRaisesRegex(CompileError, rf"ptxas serializes wgmma in {name}:\n.*serialized due to"):
                nvcc_outputs(self.cuda_home, source)
            with redirect_stdout(io.StringIO()):
                errors = check(self.cuda_home, self.kernels, self.document, True)
            self.assertRegex(errors[0], rf"NVRTC 13.0 refuses {name} for sm_90a \(result 0\):\n.*serialized due to")
            source.unlink()

    def test_a_warning_fails(self):
        unused = COPIES.replace("{ out", "{ int unused; out")
        self.assertRegex(self.check(unused)[0], r"made_up\.cu(.|\n)*unused")

    def test_a_kernel_that_includes_a_cuda_header_fails_as_it_would_at_run_time(self):
        self.assertIn("NVRTC 13.0 refuses made_up.cu", self.check("#include <cuda_bf16.h>\n" + COPIES)[0])

    def test_a_kernel_that_the_oldest_run_time_compiler_refuses_fails(self):
        newer = "#if __CUDACC_VER_MAJOR__ < 13\n#error too old\n#endif\n" + COPIES
        self.assertIn("NVRTC 12.4 refuses made_up.cu", self.check(newer)[0])

    def test_a_folder_without_kernels_fails(self):
        errors = check(self.cuda_home, self.kernels, self.document)
        self.assertIn("there is no kernel", errors[0])


if __name__ == "__main__":
    unittest.main()
