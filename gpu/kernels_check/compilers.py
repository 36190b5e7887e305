"""The compilers of the kernels, from the pinned wheels: nvcc, and NVRTC of the newest and the oldest release in use."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

from kernels_check import ptxas, sass

ARCHITECTURES = ("80", "90", "100")
# The oldest NVRTC that compiles kernels at run time (`docs/gpu.md`) knows no GPUs after Hopper.
OLDEST_NVRTC = "12.4"
OLDEST_KNOWS = ("80", "90", "90a")
# Files that compile for one architecture only: `only_for` in `kernels/src/device/kernel.rs`.
ONLY_FOR = {"attention_fused_forward_wgmma.cu": "90a", "attention_fused_backward_wgmma.cu": "90a"}
# The same options as in `kernels/src/device/cuda/module.rs`.
LANGUAGE = "--std=c++17"
# What kernels may include, as in `module.rs`.
HEADERS = (
    "common.cuh",
    "mma.cuh",
    "wgmma.cuh",
    "tma.cuh",
    "attention_fused.cuh",
    "attention_fused_wgmma.cuh",
    "attention_fused_backward.cuh",
    "attention_softmax.cuh",
    "linear_attention.cuh",
    "linear_attention_channels.cuh",
)


class CompileError(Exception):
    """A kernel does not compile, or not without warnings."""


def architectures(source: Path) -> tuple[str, ...]:
    """Returns the architectures to compile a file for."""
    return (ONLY_FOR[source.name],) if source.name in ONLY_FOR else ARCHITECTURES


def nvcc_outputs(cuda_home: Path, source: Path) -> tuple[str, str]:
    """Compiles `source` for its architectures; returns the report of `ptxas -v`, and the machine code as text."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures(source)]
    strict = ["-Xptxas", "-v", "-Werror", "all-warnings"]
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as fatbin:
        command = [cuda_home / "bin/nvcc", "-fatbin", LANGUAGE, *targets, *strict, source, "-o", fatbin.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileError(f"nvcc refuses {source.name}:\n{done.stdout}{done.stderr}")
        report = done.stdout + done.stderr
        if messages := ptxas.serialized(report):
            raise CompileError(f"ptxas serializes wgmma in {source.name}:\n" + "\n".join(messages))
        return report, sass.disassemble(cuda_home, fatbin.name)


def inlined(source: Path) -> str:
    """Returns the source for run-time compilation, which has no include path: headers are inlined."""
    text = source.read_text()
    for header in HEADERS:
        include = f'#include "{header}"'
        if include in text:
            text = text.replace(include, (source.parent / header).read_text())
    return text


def nvrtcs(cuda_home: Path) -> list["Nvrtc"]:
    """Returns the run-time compilers of the pinned wheels."""
    oldest = cuda_home / f"nvrtc-{OLDEST_NVRTC}"
    return [Nvrtc(cuda_home / "lib", "13.0"), Nvrtc(oldest, OLDEST_NVRTC, OLDEST_KNOWS)]


class Nvrtc:
    """The run-time compiler. It needs no driver to compile SASS for a given architecture."""

    def __init__(self, folder: Path, version: str, knows: tuple[str, ...] | None = None):
        # NVRTC opens its builtins by file name, so the library must be loaded already.
        ctypes.CDLL(str(folder / f"libnvrtc-builtins.so.{version}"), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(folder / f"libnvrtc.so.{version.split('.')[0]}"))
        self._version, self._knows = version, knows

    def compile(self, source: Path) -> None:
        for arch in architectures(source):
            if self._knows and arch not in self._knows:
                continue
            code, log = self._compile(inlined(source), source.name, arch)
            if code != 0 or "warning" in log or ptxas.serialized(log):
                raise CompileError(f"NVRTC {self._version} refuses {source.name} for sm_{arch} (result {code}):\n{log}")

    def _compile(self, text: str, name: str, arch: str) -> tuple[int, str]:
        program = ctypes.c_void_p()
        self._must("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        options = [f"--gpu-architecture=sm_{arch}".encode(), LANGUAGE.encode()]
        array = (ctypes.c_char_p * len(options))(*options)
        code = self._library.nvrtcCompileProgram(program, len(options), array)
        log = self._log(program)
        self._must("nvrtcDestroyProgram", ctypes.byref(program))
        return code, log

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._must("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._must("nvrtcGetProgramLog", program, log)
        return log.value.decode(errors="replace")

    def _must(self, function: str, *arguments) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise CompileError(f"{function} failed with result {code}")
