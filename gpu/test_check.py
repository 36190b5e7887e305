"""Tests of `check.py` on fake folders and machines: checks that it runs, their status, and the report."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

GPU = Path(__file__).resolve().parent
LISTS_A_GPU = 'echo "GPU 0: made up (UUID: GPU-0)"'
PASSES = 'echo "running 3 tests"; echo "test result: ok. 3 passed"'


class Check(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "folder"
        self.machine = Path(temporary.name) / "machine"
        for path in (self.folder / "bin", self.machine):
            path.mkdir(parents=True)
        for name in ("check.py", "libraries.sh"):
            shutil.copy(GPU / name, self.folder)
        (self.folder / "BUILD").write_text('commit "quoted"\nsecond line\n')

    def script(self, path: Path, body: str) -> None:
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def binary(self, name: str, body: str) -> None:
        self.script(self.folder / "bin" / name, body)

    def run_check(self, *options: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{self.machine}:{os.environ['PATH']}"}
        return subprocess.run([sys.executable, self.folder / "check.py", *options], env=environment, capture_output=True, text=True)

    def run_with_gpu(self, *options: str) -> tuple[int, dict[str, dict]]:
        self.script(self.machine / "nvidia-smi", LISTS_A_GPU)
        done = self.run_check(*options)
        report = json.loads((self.folder / "results/report.json").read_text())
        self.assertEqual(report["build"], 'commit "quoted"\nsecond line')
        self.assertIn("made up", report["devices"][0])
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

    def test_what_passes_fails_and_was_not_built_is_told_apart(self):
        self.binary("test_kernels", PASSES)
        self.binary("test_engine", 'echo "panicked at \\"x\\"\t\\ end"; exit 101')
        code, checks = self.run_with_gpu()
        self.assertEqual(code, 1)
        self.assertEqual(checks["kernels"]["status"], "passed")
        self.assertEqual((checks["golden"]["status"], checks["golden"]["reason"]), ("failed", "exit code 101"))
        self.assertEqual(checks["golden"]["output"], 'panicked at "x"\t\\ end')
        self.assertEqual(checks["collectives_of_threads"]["status"], "not run")
        self.assertIn("not built", checks["collectives_of_threads"]["reason"])

    def test_a_filter_that_no_test_matches_is_not_a_pass(self):
        self.binary("test_engine", f'case "$1" in parity::precision::*) echo "running 0 tests" ;; *) {PASSES} ;; esac')
        code, checks = self.run_with_gpu()
        self.assertEqual((code, checks["golden"]["status"]), (0, "passed"))
        self.assertEqual(checks["precision"]["status"], "not run")

    def test_tests_are_told_their_device_and_where_their_fixtures_are(self):
        self.binary("test_kernels", f'echo "$ULYSSES_TEST_DEVICE $CARGO_MANIFEST_DIR"')
        _, checks = self.run_with_gpu()
        self.assertEqual(checks["kernels"]["output"], f"cuda {self.folder}")

    def test_a_second_run_repeats_what_failed_and_what_is_asked_for(self):
        self.binary("test_kernels", f"{PASSES}; echo again >> kernels.log")
        self.binary("test_engine", 'case "$1" in parity::precision::*) exit 1 ;; esac')
        runs = lambda: (self.folder / "kernels.log").read_text().count("again")
        code, checks = self.run_with_gpu("--only", "kernels*")
        self.assertEqual((code, {name: checks[name]["status"] for name in checks}), (0, {"kernels": "passed"}))
        code, checks = self.run_with_gpu()
        self.assertEqual((code, runs(), checks["precision"]["status"]), (1, 1, "failed"))
        self.assertEqual((checks["kernels"]["status"], checks["golden"]["status"]), ("passed", "passed"))
        self.binary("test_engine", "true")
        code, checks = self.run_with_gpu()
        self.assertEqual((code, checks["precision"]["status"]), (0, "passed"))
        self.run_with_gpu("--again", "--only", "kernels*")
        self.assertEqual(runs(), 2)

    def test_time_that_ends_leaves_a_report_and_kills_what_runs(self):
        self.binary("test_engine", "sleep 600 & wait")
        self.binary("test_kernels", PASSES)
        code, checks = self.run_with_gpu("--minutes", "0.15", "--only", "golden", "kernels")
        self.assertEqual((code, checks["golden"]["status"]), (0, "not run"))
        self.assertRegex(checks["golden"]["reason"], "cut after [0-9]+ s, where --minutes ended")
        self.assertEqual(checks["kernels"]["reason"], "no time was left")
        with tarfile.open(self.folder / "results/logs.tar.gz") as archive:
            self.assertIn("logs/golden.out", archive.getnames())

    def test_the_version_of_nccl_is_the_one_that_doctor_finds(self):
        self.binary("test_comm", f'echo "ranks ${{ULYSSES_TEST_NCCL_RANKS:-}}"; {PASSES}')
        for version, status in (("", "not run"), ("2.28.9", "not run"), ("2.30.3", "passed")):
            findings = [{"name": "NCCL", "state": "ok", "text": f"{version}, /lib/libnccl.so.2"}] if version else []
            self.binary("ulysses", f"echo '{json.dumps({'findings': findings})}'")
            _, checks = self.run_with_gpu("--only", "nccl_*")
            self.assertEqual(checks["nccl_1_ranks"]["status"], "passed" if version else "not run")
            self.assertEqual(checks["nccl_2_ranks"]["status"], status, version)

    def test_tables_are_made_of_the_figures_of_benchmarks(self):
        passes = '"forward bf16": {"gflop_per_s": 105000.0}, "backward bf16": {"gflop_per_s": 75000.0}'
        body = f"""echo noise >&2
            case $2 in
            attention) echo '{{"figures": {{{passes}}}}}' ;;
            train) echo '{{"figures": {{"train_step": {{"ms": 50.0, "ms_fastest": 40.0}}}}}}' ;;
            *) echo '{{}}' ;;
            esac"""
        self.binary("ulysses", body)
        of_torch = [f'{{"seq_len": {tokens}, "layer_step": {{"ms": 60.0}}}}' for tokens in (4096, 16384)]
        lines = "; ".join(f"echo '{line}'" for line in of_torch)
        self.script(self.machine / "python3", f'test "$1" = pytorch_peer.py || exit 0; {lines}')
        code, checks = self.run_with_gpu()
        self.assertEqual((code, checks["layer_4096"]["status"]), (0, "passed"), checks["layer_4096"])
        document = self.folder / "gpu.md"
        document.write_text("before\n<!-- gpu-results: begin -->\nobsolete\n<!-- gpu-results: end -->\nafter\n")
        command = [sys.executable, GPU / "tables.py", self.folder / "results/report.json", "--write", document]
        subprocess.run(command, check=True)
        text = document.read_text()
        self.assertTrue(text.startswith("before\n") and text.endswith("after\n") and "obsolete" not in text, text)
        self.assertIn("| 16384 | 128 | 105 / 75 | 105 / 75 | 105 / 75 | – / – | – / – | – / – |", text)
        self.assertIn("| 4096 | 50 | 40 | 60 |", text)


if __name__ == "__main__":
    unittest.main()
