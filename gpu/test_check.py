"""Tests of `check.sh` on fake folders and machines: checks that it runs, their status, and the report."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

GPU = Path(__file__).resolve().parent
LISTS_A_GPU = 'echo "GPU 0: made up (UUID: GPU-0)"'
USES_IT = 'echo 7 > "$ULYSSES_GPU_WITNESS"'
PASSES = f'{USES_IT}; echo "running 3 tests"; echo "test result: ok. 3 passed"'

DRIVER = """
int cuDevicePrimaryCtxRetain(void **context, int device) { return device; }
int cuLaunchKernel(void) { return 0; }
"""
PROGRAM = """
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuLaunchKernel(void *, ...);
int main(int argc, char **argv) {
    (void)argv;
    void *context;
    if (cuDevicePrimaryCtxRetain(&context, argc > 2)) return 0;
    for (int i = 0; i < 3; ++i) cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void **)0, (void **)0);
}
"""


def cc(output: Path, source: str, *options: str) -> None:
    command = ["cc", "-x", "c", "-", "-x", "none", "-o", output, *options]
    subprocess.run(command, input=source, text=True, check=True)


class Check(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "folder"
        self.machine = Path(temporary.name) / "machine"
        for path in (self.folder / "bin", self.machine):
            path.mkdir(parents=True)
        for name in ("check.sh", "libraries.sh"):
            shutil.copy(GPU / name, self.folder)
        (self.folder / "lib").mkdir()
        cc(self.folder / "lib/libwitness.so", (GPU / "witness.c").read_text(), "-shared", "-fPIC", "-ldl")
        (self.folder / "BUILD").write_text('commit "quoted"\nsecond line\n')

    def script(self, path: Path, body: str) -> None:
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def binary(self, name: str, body: str) -> None:
        self.script(self.folder / "bin" / name, body)

    def run_check(self, *options: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{self.machine}:/usr/bin:/bin"}
        return subprocess.run([self.folder / "check.sh", *options], env=environment, capture_output=True, text=True)

    def run_with_gpu(self, *options: str) -> tuple[int, dict[str, dict]]:
        self.script(self.machine / "nvidia-smi", LISTS_A_GPU)
        done = self.run_check(*options)
        report = json.loads((self.folder / "results/report.json").read_text())
        self.assertEqual(report["build"], 'commit "quoted"\nsecond line')
        self.assertIn("made up", report["devices"])
        return done.returncode, {check["name"]: check for check in report["checks"]}

    def test_a_machine_without_a_driver_is_told_in_one_line_and_exit_code_2(self):
        done = self.run_check()
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("no NVIDIA driver", done.stderr)
        self.assertFalse((self.folder / "results/report.json").exists())

    def test_a_driver_without_a_gpu_is_told_in_one_line_and_exit_code_2(self):
        self.script(self.machine / "nvidia-smi", "echo 'No devices were found'; exit 6")
        done = self.run_check()
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("lists no GPU", done.stderr)

    def test_missing_libraries_are_named(self):
        self.script(self.machine / "nvidia-smi", LISTS_A_GPU)
        self.script(self.machine / "ldd", "printf '\\tlibcublas.so.13 => not found\\n'")
        done = self.run_check()
        self.assertEqual(done.returncode, 2)
        self.assertIn("libcublas.so.13", done.stderr)

    def test_what_passes_fails_and_was_not_built_is_told_apart(self):
        self.binary("test_kernels", PASSES)
        self.binary("test_parity", 'echo "panicked at \\"x\\"\t\\ end"; exit 101')
        code, checks = self.run_with_gpu()
        self.assertEqual(code, 1)
        self.assertEqual(checks["kernels_and_ops"]["status"], "passed")
        self.assertEqual((checks["golden"]["status"], checks["golden"]["reason"]), ("failed", "exit code 101"))
        self.assertEqual(checks["golden"]["output"], 'panicked at "x"\t\\ end')
        self.assertEqual(checks["zero_parity"]["status"], "not run")
        self.assertIn("not built", checks["zero_parity"]["reason"])

    def test_a_filter_that_no_test_matches_is_not_a_pass(self):
        self.binary("test_parity", f'case "$1" in precision::) echo "running 0 tests" ;; *) {PASSES} ;; esac')
        code, checks = self.run_with_gpu()
        self.assertEqual((code, checks["golden"]["status"]), (0, "passed"))
        self.assertEqual(checks["precision_16_bits"]["status"], "not run")

    def test_tests_are_told_their_device_and_where_their_fixtures_are(self):
        self.binary("test_kernels", f'{USES_IT}; echo "$ULYSSES_TEST_DEVICE $CARGO_MANIFEST_DIR"')
        _, checks = self.run_with_gpu()
        self.assertEqual(checks["kernels_and_ops"]["output"], f"cuda {self.folder}")

    def test_a_second_run_repeats_what_failed_and_what_is_asked_for(self):
        self.binary("test_kernels", f"{PASSES}; echo again >> kernels.log")
        self.binary("test_parity", f'{USES_IT}; test "$1" != precision:: || exit 1')
        runs = lambda: (self.folder / "kernels.log").read_text().count("again")
        code, checks = self.run_with_gpu("--only", "kernels*")
        self.assertEqual((code, {name: checks[name]["status"] for name in checks}), (0, {"kernels_and_ops": "passed"}))
        code, checks = self.run_with_gpu()
        self.assertEqual((code, runs(), checks["precision_16_bits"]["status"]), (1, 1, "failed"))
        self.assertEqual((checks["kernels_and_ops"]["status"], checks["golden"]["status"]), ("passed", "passed"))
        self.binary("test_parity", USES_IT)
        code, checks = self.run_with_gpu()
        self.assertEqual((code, checks["precision_16_bits"]["status"]), (0, "passed"))
        self.run_with_gpu("--again", "--only", "kernels*")
        self.assertEqual(runs(), 2)

    def test_tables_are_made_of_the_figures_of_benchmarks(self):
        passes = '"forward bf16": {"gflop_per_s": 105000.0}, "backward bf16": {"gflop_per_s": 75000.0}'
        body = f"""{USES_IT}; echo noise >&2
            case $2 in
            attention) echo '{{"settings": {{"kernels": "wgmma"}}, "figures": {{{passes}}}}}' ;;
            train) echo '{{"figures": {{"train_step": {{"tokens_per_second": 5000.0}}}}}}' ;;
            *) echo '{{}}' ;;
            esac"""
        self.binary("ulysses", body)
        step = """{"layer_step": {"tokens_per_second": 10000.0}}"""
        self.script(self.machine / "python3", f"""test "$1" = pytorch_peer.py || exit 0; {USES_IT}; echo '{step}'""")
        code, checks = self.run_with_gpu()
        self.assertEqual((code, checks["bench_layer_4096"]["status"]), (0, "passed"), checks["bench_layer_4096"])
        document = self.folder / "gpu.md"
        document.write_text("before\n<!-- gpu-results: begin -->\nobsolete\n<!-- gpu-results: end -->\nafter\n")
        command = ["python3", GPU / "tables.py", self.folder / "results/report.json", "--write", document]
        subprocess.run(command, check=True)
        text = document.read_text()
        self.assertTrue(text.startswith("before\n") and text.endswith("after\n") and "obsolete" not in text, text)
        self.assertIn("| 16384 | wgmma | 105 / 75 | 105 / 75 | 105 / 75 | – / – | – / – | – / – |", text)
        self.assertIn("| 32768 | 5000 | 10000 | 0.5 |", text)

    def test_the_comparison_of_attention_kernels_runs_under_each_sanitizer_that_the_machine_has(self):
        self.binary("ulysses", f"{USES_IT}; echo \"$@ $XDG_CACHE_HOME\"")
        _, checks = self.run_with_gpu("--only", "sanitizer_*")
        self.assertEqual({check["status"] for check in checks.values()}, {"not run"})
        self.assertIn("compute-sanitizer was not found", checks["sanitizer_racecheck"]["reason"])
        self.script(self.machine / "compute-sanitizer", 'test "$2" != racecheck || exit 9; shift 4; exec "$@"')
        code, checks = self.run_with_gpu("--only", "sanitizer_*")
        status = {name: check["status"] for name, check in checks.items()}
        tools = {"sanitizer_memcheck": "passed", "sanitizer_racecheck": "failed", "sanitizer_synccheck": "passed"}
        self.assertEqual((code, status), (1, tools), checks)
        self.assertRegex(checks["sanitizer_memcheck"]["output"], "^bench attention --device cuda .*/cache_memcheck$")

    def test_what_passes_without_using_a_gpu_was_not_run(self):
        cc(self.folder / "lib/libcuda.so.1", DRIVER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
        cc(self.folder / "bin/test_parity", PROGRAM, str(self.folder / "lib/libcuda.so.1"))
        self.binary("test_zero", "true")
        _, checks = self.run_with_gpu()
        status = {name: (checks[name]["status"], checks[name]["kernel_launches"]) for name in checks}
        self.assertEqual(status["golden"], ("passed", 3))
        self.assertEqual(status["zero_parity"], ("not run", None))
        self.assertEqual(checks["zero_parity"]["reason"], "it passed without using a GPU")

    def test_two_nccl_ranks_on_one_gpu_run_where_the_version_allows_it(self):
        library = self.machine / "libnccl.so.2"
        self.script(self.machine / "ldd", f"echo 'libnccl.so.2 => {library} (0x0)'")
        self.binary("test_comm", f'echo "ranks ${{ULYSSES_TEST_NCCL_RANKS:-}}"; {PASSES}')
        for version, status in (("2.28.9", "not run"), ("2.30.3", "passed")):
            library.write_bytes(b"\x00NCCL version %d\x00NCCL version " + version.encode() + b"+cuda13.0\x00")
            _, checks = self.run_with_gpu()
            self.assertEqual(checks["comm_conformance_nccl_1_ranks"]["status"], "passed")
            self.assertEqual(checks["comm_conformance_nccl_2_ranks"]["status"], status, version)

    def test_without_nccl_its_checks_are_not_run(self):
        self.binary("test_comm", PASSES)
        _, checks = self.run_with_gpu()
        self.assertEqual(checks["comm_conformance_threads"]["status"], "passed")
        self.assertIn("libnccl.so.2", checks["comm_conformance_nccl_1_ranks"]["reason"])


if __name__ == "__main__":
    unittest.main()
