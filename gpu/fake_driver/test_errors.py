"""Errors of the driver, NVRTC, cuBLAS and NCCL: each ends training with a message that names the failed call, and nothing hangs.

    ULYSSES=target/fake/release/ulysses gpu/fake-driver.sh python3 gpu/fake_driver/test_errors.py

Of the failing calls, every third one is tried, by ULYSSES_TEST_SEED; all with ULYSSES_TEST_SEED=all.
"""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ULYSSES = os.environ["ULYSSES"]
# Far more than a run takes on a busy machine: a hang is a failure.
LIMIT_S = 300
CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "ulysses": {"model": "nano", "seq_len": 16, "steps": 1, "comm": {"timeout_seconds": 20}},
}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
UNKNOWN = r"DriverError\(CUDA_ERROR_UNKNOWN"
# A lost GPU: the driver's error, or that of cuBLAS if a matmul is the first call.
LOST = "(CUDA_ERROR_ILLEGAL_ADDRESS|CUBLAS_STATUS_EXECUTION_FAILED)"
CUDA_13 = ["libcuda.so.1", "libcublas.so.13", "libnvrtc.so.13", "libcudart.so.13", "libcurand.so.10", "libnccl.so.2"]
CUDA_12 = [name.replace(".so.13", ".so.12") for name in CUDA_13]
LIBRARIES = Path(__file__).resolve().parents[2] / "target/fake-driver/lib"
# FAKE_DRIVER_FAIL, and what the program then says.
ONE_GPU = {
    "cuDevicePrimaryCtxRetain:1": f"rank 0 failed: cannot open GPU 0: {UNKNOWN}",
    "cuStreamCreate:1": f"rank 0 failed: cannot open GPU 0: {UNKNOWN}",
    "cublasCreate_v2:1": "rank 0 failed: cannot open GPU 0: CublasError",
    "cuMemPoolSetAttribute:1": f"rank 0 failed: cannot open GPU 0: {UNKNOWN}",
    "cuModuleLoadData:1+=209": "cannot open GPU 0: the driver refused kernels/cuda/",
    "cuFuncLoad:1+": f"cannot open GPU 0: the driver refused kernels/cuda/[a-z_]+.cu: {UNKNOWN}",
    "cuMemAllocAsync:60": r"out of memory .*: out of GPU memory: requested [0-9.]+ [KMG]iB, free 16.00 GiB of 16.00",
    "cuMemHostAlloc:1": r"cannot allocate [0-9.]+ [KMG]iB of page-locked host memory: the host has no more",
    "cuMemHostAlloc:1=999": f"cannot allocate [0-9.]+ [KMG]iB of page-locked host memory: {UNKNOWN}",
    "cuLaunchKernel:50+": rf"rank 0 failed: .*kernel `\w+`: {UNKNOWN}",
    "cublasGemmStridedBatchedEx:5": r"matmul of \[\d+, \d+\] and \[\d+, \d+\]: CublasError\(CUBLAS_STATUS_EXECUTION_FAILED",
    "cublasSetMathMode:5": r"matmul of \[\d+, \d+\] and \[\d+, \d+\]: CublasError\(CUBLAS_STATUS_EXECUTION_FAILED",
    "cuMemcpyDtoHAsync_v2:1": f"rank 0 failed: .*{UNKNOWN}",
    "cuMemcpyHtoDAsync_v2:3": f"rank 0 failed: .*{UNKNOWN}",
    # A GPU that is lost during a step.
    "*:2000+=700": f"rank 0 failed: .*{LOST}",
}
OFFLOADED = {
    "cuStreamCreate:2": "cannot offload optimizer state to page-locked host memory",
    "cuMemHostAlloc:2": "cannot offload .* host memory: the host has no more; free some, offload less",
    "cuMemcpyDtoHAsync_v2:2": f"cannot offload .*{UNKNOWN}",
    "cuEventRecord:40": f"cannot offload .*{UNKNOWN}",
}
TWO_GPUS = {
    "ncclGetVersion:1": r"cannot start NCCL on rank \d: unhandled system error",
    "ncclGetUniqueId:1": "cannot start NCCL on rank 0: unhandled system error",
    "ncclCommInitRankConfig:1": r"cannot start NCCL on rank \d: unhandled system error",
    "cuDeviceGetUuid_v2:1": rf"cannot start NCCL on rank \d: {UNKNOWN}",
    "cuStreamCreate:3": rf"cannot start NCCL on rank \d: {UNKNOWN}",
    "cublasGemmStridedBatchedEx:5": r"cannot start NCCL on rank \d: matmul of",
    "ncclCommSplit:1": r'NCCL, split #\d+ of group "world" on rank \d: unhandled system error',
    "ncclAllReduce:2": r'NCCL, all_reduce #\d+ of group "\w+" on rank \d: unhandled system error',
    # It polls while NCCL starts, too, so that the 20th poll may come before the first collective.
    "ncclCommGetAsyncError:20": r"rank \d: unhandled system error",
    "cuEventQuery:30+=700": r'NCCL, \w+ #\d+ of group "\w+" on rank \d: DriverError\(CUDA_ERROR_ILLEGAL_ADDRESS',
    "cuMemAllocAsync:250": r"rank \d failed: .*out of GPU memory",
    "cuLaunchKernel:200+": rf"rank \d failed: .*kernel `\w+`: {UNKNOWN}",
    # One rank fails, and the other is told the cause. The first 72 matmuls load kernels.
    "cublasGemmStridedBatchedEx:90": r"error: rank \d failed: .*matmul of",
    "*:3000+=700": rf"rank \d failed: .*{LOST}",
}
# What it survives: a compiled kernel in the cache that does not load, and the end of the program.
HARMLESS = ["cuModuleLoadData:1", "ncclCommFinalize:1", "ncclCommDestroy:1", "ncclCommAbort:1"]


def sampled(failures):
    """Returns every third one of the failures, or all of them."""
    seed = os.environ.get("ULYSSES_TEST_SEED", "0")
    return list(failures) if seed == "all" else list(failures)[int(seed) % 3 :: 3]


class Errors(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)
        (self.path / "text.txt").write_text("A text to train on, of some length. " * 100)

    def train(self, *arguments, mesh="1x1", zero=None, **environment):
        """Trains a step; returns the exit code and the output."""
        config = self.path / "config.json"
        config.write_text(json.dumps(CONFIG | {"zero_optimization": zero or {"stage": 0}}))
        output = tempfile.mkdtemp(dir=self.path)
        flags = ["--data", self.path / "text.txt", "--output", output, "--mesh", mesh]
        command = [ULYSSES, "train", config, *flags, "--threads-per-rank", "1", *arguments]
        done = subprocess.run(
            [str(word) for word in command], env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        return done.returncode, done.stdout + done.stderr

    def check(self, failures, **how):
        for failure, said in sampled(failures.items()):
            with self.subTest(failure=failure):
                code, output = self.train(FAKE_DRIVER_FAIL=failure, **how)
                self.assertEqual(code, 1, output)
                self.assertRegex(output, said)
                self.assertNotIn("panicked", output)

    def test_errors_of_one_gpu(self):
        self.check(ONE_GPU)

    def test_errors_of_offload(self):
        self.check(OFFLOADED, zero=OFFLOAD)

    def test_errors_of_two_gpus(self):
        self.check(TWO_GPUS, mesh="1x2", FAKE_DRIVER_GPUS="2")

    def test_a_compiler_that_refuses_a_kernel_is_quoted(self):
        for call, said in [("nvrtcCompileProgram", "COMPILATION"), ("nvrtcGetCUBIN", "INTERNAL")]:
            with self.subTest(call=call):
                empty = {"XDG_CACHE_HOME": str(self.path / call)}
                code, output = self.train(FAKE_DRIVER_FAIL=f"{call}:1+", **empty)
                self.assertEqual(code, 1, output)
                self.assertRegex(output, rf"cannot open GPU 0: NVRTC refused kernels/cuda/\w+.cu for sm_90: .*{said}")

    def test_a_compiler_that_warns_of_slow_kernels_is_quoted(self):
        warning = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        code, output = self.train(FAKE_NVRTC_WARNING=warning, XDG_CACHE_HOME=str(self.path / "slow"))
        self.assertEqual(code, 0, output)
        said = f"kernels/cuda/attention_fused_forward_wgmma.cu for sm_90a is slower than it should be: {warning}"
        self.assertIn(said, output)
        # It is said in every run.
        self.assertIn(said, self.train(FAKE_NVRTC_WARNING=warning, XDG_CACHE_HOME=str(self.path / "slow"))[1])

    def test_fused_attention_that_disagrees_with_the_tiled_kernels_is_not_used(self):
        cache = {"XDG_CACHE_HOME": str(self.path / "verdict")}
        bf16 = ["--set", "bf16.enabled=true"]
        # The tiled kernels are then wrong, and so is all that is trained.
        _, output = self.train(*bf16, FAKE_DRIVER_SEED_FAULT="swapped_operands", **cache)
        said = r"fused attention kernels for heads of 64 are not used.*bf16 elements: \w+ differs by up to"
        self.assertRegex(output, said)
        # The verdict is cached.
        self.assertRegex(self.train(*bf16, **cache)[1], said)
        verdicts = list((self.path / "verdict").glob("ulysses/attention-bf16-*.verdict"))
        self.assertEqual(len(verdicts), 5, "three head dimensions on all GPUs, two on those of compute capability 9.0")
        for verdict in verdicts:
            verdict.unlink()
        code, output = self.train(*bf16, **cache)
        # The first kernels that agree are used: one verdict for each head dimension.
        texts = [verdict.read_text() for verdict in (self.path / "verdict").glob("ulysses/attention-bf16-*.verdict")]
        self.assertEqual((code, texts), (0, [""] * 3), output)
        self.assertNotIn("disagree", output)

    def test_fused_attention_that_does_not_compile_or_load_is_not_used(self):
        kernel = "attention_fused_backward_keys_bf16_64"
        refusals = {
            f"nvrtcCompileProgram({kernel}):1+": "NVRTC refused kernels/cuda/attention_fused_backward.cu for sm_90: .*COMPILATION",
            f"cuModuleLoadData({kernel}):1+": "the driver refused kernels/cuda/attention_fused_backward.cu: .*INVALID_IMAGE",
        }
        for index, (failure, said) in enumerate(refusals.items()):
            with self.subTest(failure=failure):
                cache = {"XDG_CACHE_HOME": str(self.path / f"refused-{index}")}
                bf16 = ["--set", "bf16.enabled=true"]
                code, output = self.train(*bf16, FAKE_DRIVER_FAIL=failure, **cache)
                self.assertEqual(code, 0, output)
                self.assertRegex(output, f"kernels for heads of 64 are not used: they do not compile or load here: {said}")
                # It is no property of the GPU that a later run should know of.
                self.assertEqual(list((self.path / f"refused-{index}").glob("ulysses/*.verdict")), [])

    def test_fused_attention_whose_tensors_have_no_maps_is_not_used(self):
        cache = {"XDG_CACHE_HOME": str(self.path / "maps")}
        code, output = self.train("--set", "bf16.enabled=true", FAKE_DRIVER_FAIL="cuTensorMapEncodeTiled:1+", **cache)
        self.assertEqual(code, 0, output)
        refused = f"capability 9.0 for heads of 64 are not used: they do not start here: .*tensor map: a tensor of .*{UNKNOWN}"
        self.assertRegex(output, refused)

    def test_kernels_that_end_the_gpu_in_their_comparison_are_not_used_by_the_next_run(self):
        failed = "the comparison of the fused with the tiled attention kernels failed on this GPU; start the program again"
        unfinished = "capability 9.0 for heads of 64 are not used: an earlier comparison with the tiled kernels did not end"
        # The copy of the first output: of a lost GPU, and of one that works on.
        for failure, is_lost in [("cuMemcpyDtoHAsync_v2:1=700,cuStreamSynchronize:1+=700", True), ("cuMemcpyDtoHAsync_v2:1", False)]:
            with self.subTest(failure=failure):
                folder = self.path / f"lost-{is_lost}"
                cache = {"XDG_CACHE_HOME": str(folder)}
                bf16 = ["--set", "bf16.enabled=true"]
                code, output = self.train(*bf16, FAKE_DRIVER_FAIL=failure, **cache)
                self.assertEqual(code, 1, output)
                self.assertRegex(output, failed)
                self.assertEqual(len(list(folder.glob("ulysses/*.verdict"))), int(is_lost))
                code, output = self.train(*bf16, **cache)
                self.assertEqual((code, unfinished in output), (0, is_lost), output)
                texts = [file.read_text() for file in folder.glob("ulysses/*.verdict")]
                self.assertEqual((sum(text == "" for text in texts), len(texts)), (3, 3 + int(is_lost)), texts)

    def test_what_is_harmless_changes_nothing(self):
        for failure in HARMLESS:
            with self.subTest(failure=failure):
                code, output = self.train(mesh="1x2", FAKE_DRIVER_GPUS="2", FAKE_DRIVER_FAIL=failure)
                self.assertEqual(code, 0, output)

    def test_a_gpu_without_memory_pools_trains(self):
        for mesh, gpus in [("1x1", "1"), ("1x2", "2")]:
            with self.subTest(mesh=mesh):
                code, output = self.train(mesh=mesh, FAKE_DRIVER_GPUS=gpus, FAKE_DRIVER_MEMORY_POOLS="0")
                self.assertEqual(code, 0, output)

    def test_a_gpu_that_the_program_chose_but_cannot_open_is_an_error_with_a_remedy(self):
        remedy = "use --device cpu to run without GPUs"
        for device, has_remedy in [("auto", True), ("cuda", False)]:
            for mesh, gpus in [("1x1", "1"), ("1x2", "2")]:
                with self.subTest(device=device, mesh=mesh):
                    failing = {"FAKE_DRIVER_FAIL": "cuDevicePrimaryCtxRetain:1", "FAKE_DRIVER_GPUS": gpus}
                    code, output = self.train("--device", device, mesh=mesh, **failing)
                    self.assertEqual((code, remedy in output), (1, has_remedy), output)

    def test_a_driver_that_does_not_start_leaves_the_cpu(self):
        code, output = self.train(FAKE_DRIVER_FAIL="cuInit:1+")
        self.assertEqual(code, 0, output)
        self.assertRegex(output, rf"device: cpu \(no usable NVIDIA GPU: {UNKNOWN}")
        code, output = self.train("--device", "cuda", FAKE_DRIVER_FAIL="cuInit:1+")
        self.assertEqual(code, 2, output)
        self.assertRegex(output, rf"--device cuda: no usable NVIDIA GPU: {UNKNOWN}.*; use --device cpu")

    def libraries(self, *names):
        """Returns an environment with these libraries only: the fake ones, whatever their version."""
        folder = Path(tempfile.mkdtemp(dir=self.path))
        for name in names:
            [library] = LIBRARIES.glob(name.split(".so")[0] + ".so.*")
            (folder / name).symlink_to(library)
        return {"LD_LIBRARY_PATH": str(folder)}

    def test_without_a_driver_the_program_starts_and_trains_on_the_cpu(self):
        missing = r"no usable NVIDIA GPU: libcuda.so.1: cannot open shared object file"
        none = self.libraries()
        code, output = self.train(**none)
        self.assertEqual(code, 0, output)
        self.assertRegex(output, rf"device: cpu \({missing}")
        code, output = self.train("--device", "cuda", **none)
        self.assertEqual(code, 2, output)
        self.assertRegex(output, rf"--device cuda: {missing}.*; use --device cpu")
        doctor = subprocess.run([ULYSSES, "doctor"], env=os.environ | none, capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual(doctor.returncode, 0, doctor.stdout + doctor.stderr)
        self.assertRegex(doctor.stdout, missing)

    def test_a_library_that_is_missing_next_to_a_driver_is_named(self):
        code, output = self.train(**self.libraries("libcuda.so.1"))
        self.assertEqual(code, 1, output)
        self.assertRegex(output, "cannot open GPU 0: libcublas.so.13: cannot open shared object file")
        without_nccl = [name for name in CUDA_13 if "nccl" not in name]
        code, output = self.train(mesh="1x2", FAKE_DRIVER_GPUS="2", **self.libraries(*without_nccl))
        self.assertEqual(code, 1, output)
        self.assertRegex(output, "cannot start NCCL on rank .: libnccl.so.2 is not loaded")

    def test_a_driver_of_cuda_12_gets_the_libraries_of_cuda_12(self):
        code, output = self.train("--device", "cuda", FAKE_DRIVER_VERSION="12040", **self.libraries(*CUDA_12))
        self.assertEqual(code, 0, output)
        code, output = self.train("--device", "cuda", FAKE_DRIVER_VERSION="12040", **self.libraries(*CUDA_13))
        self.assertEqual(code, 1, output)
        self.assertRegex(output, "cannot open GPU 0: libcublas.so.12: cannot open shared object file")


if __name__ == "__main__":
    unittest.main()
