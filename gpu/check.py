#!/usr/bin/env python3
"""Runs the GPU checks of a folder built by gpu/build.sh, the most valuable first: docs/gpu.md.

    ./check.py [--minutes N] [--again] [RESULTS] [--only PATTERN…]

After each check RESULTS (default `results`) has report.json with all results so far and logs.tar.gz with all outputs, so that
a machine that is borrowed for minutes leaves them when its time ends. Each check has a time limit of its own, cut to what is
left of --minutes. Checks that passed are not repeated, except with --again. PATTERN: names of the checks to run, such as
'attention_*'. `gpu/tables.py` makes the tables of docs/gpu.md from the report.

Exit code: 0 no check failed, 1 a check failed, 2 this machine cannot run any check.
"""

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OUTPUT_LINES = 60
# Below this, what is left of --minutes is not worth a start.
LEAST_SECONDS = 5
LLAMA = ["--num-heads", "32", "--num-kv-heads", "8"]
# NCCL lets two ranks share a GPU from this version on.
NCCL_OF_SHARED_GPUS = (2, 30)


@dataclass
class Check:
    """A command whose exit code tells whether it passed; with `has_figures` it prints JSON."""

    name: str
    limit: int
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    has_figures: bool = False
    # Why this machine cannot run it.
    missing: str = ""


@dataclass
class Machine:
    gpus: list[str]
    # The version of NCCL, as `ulysses doctor` finds it.
    nccl: tuple[int, ...]
    has_torch: bool


def tests(name: str, limit: int, binary: str, *filters: str, **environment: str) -> Check:
    """Tests on a GPU, with samples of the large matrices (docs/testing.md)."""
    always = {"ULYSSES_TEST_DEVICE": "cuda", "ULYSSES_TEST_SEED": "1"}
    return Check(name, limit, [f"bin/test_{binary}", *filters], always | environment)


def bench(name: str, limit: int, *arguments: str) -> Check:
    command = ["bin/ulysses", "bench", *arguments, "--device", "cuda", "--json"]
    return Check(name, limit, command, has_figures=True)


def attention(head_dim: int, tokens: int, kernels: str, limit: int = 60) -> Check:
    """The heads of Llama 3."""
    shape = [*LLAMA, "--head-dim", str(head_dim), "--seq-len", str(tokens)]
    name = f"attention_{kernels}_{head_dim}_{tokens}"
    return bench(name, limit, "attention", "--dtype", "bf16", "--no-f32", *shape, "--kernels", kernels, "--repeats", "5")


def steps(name: str, limit: int, model: str, tokens: int, *flags: str) -> Check:
    return bench(name, limit, "train", "--dtype", "bf16", "--model", model, "--seq-len", str(tokens), "--repeats", "5", *flags)


def layer(tokens: int) -> Check:
    """A training step of one layer of Llama 3 8B."""
    return steps(f"layer_{tokens}", 90, "llama3-8b", tokens, "--num-layers", "1", "--vocab-size", "256")


def pytorch(machine: Machine, name: str, head_dim: int, *tokens: int) -> Check:
    command = ["python3", "pytorch_peer.py", *LLAMA, "--head-dim", str(head_dim), "--seq-len", *map(str, tokens)]
    missing = "" if machine.has_torch else "python3 has no PyTorch that sees a GPU"
    return Check(name, 120, command, has_figures=True, missing=missing)


def train(name: str, *flags: str) -> Check:
    config = ["configs/long_sequence.json", "--device", "cuda", "--backend", "thread", "--data", "text"]
    return Check(name, 90, ["bin/ulysses", "train", *config, "--output", f"/tmp/ulysses-check-{os.getpid()}/{name}", *flags])


def nccl(machine: Machine, ranks: int) -> Check:
    missing = ""
    if not machine.nccl:
        missing = "doctor found no libnccl.so.2"
    elif ranks > len(machine.gpus) and machine.nccl < NCCL_OF_SHARED_GPUS:
        missing = f"{ranks} ranks on {len(machine.gpus)} GPU need NCCL 2.30, here is {'.'.join(map(str, machine.nccl))}"
    environment = {"ULYSSES_TEST_NCCL_RANKS": str(ranks), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    check = tests(f"nccl_{ranks}_ranks", 120, "comm", "conformance::nccl", **environment)
    check.missing = missing
    return check


def over_nccl(machine: Machine, name: str, binary: str, *filters: str) -> Check:
    """A suite with a GPU per rank."""
    check = tests(name, 600, binary, *filters, ULYSSES_TEST_DEVICE="nccl")
    check.missing = "" if len(machine.gpus) >= 8 else "its meshes have up to 8 ranks, with a GPU each"
    return check


def sanitizer(tool: str) -> Check:
    """compute-sanitizer on the fused attention kernels. racecheck and synccheck raise false alarms on kernels whose warps
    have different tasks (CUTLASS issue 2626)."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=attention_fused"]
    run = ["bin/ulysses", "bench", "attention", "--device", "cuda", "--dtype", "bf16", "--no-f32", "--seq-len", "300", "--repeats", "1"]
    missing = "" if shutil.which("compute-sanitizer") else "compute-sanitizer was not found; the CUDA toolkit has it"
    return Check(f"sanitizer_{tool}", 120, command + run, missing=missing)


def all_checks(machine: Machine) -> list[Check]:
    recomputes = ["--set", "ulysses.activation_checkpointing=true"]
    offloads = [f"zero_optimization.offload_{what}.device=cpu" for what in ("optimizer", "param")]
    profile = ["--ranks", "1", "--model", "llama3-8b", "--tokens", "16384", "--mib", "1024", "--repeats", "5"]
    return [
        Check("devices", 20, ["nvidia-smi"]),
        Check("doctor", 120, ["bin/ulysses", "doctor"]),
        *(attention(128, 16384, kernels) for kernels in ("wgmma", "fused")),
        attention(128, 4096, "wgmma"),
        attention(64, 16384, "wgmma"),
        tests("golden", 90, "engine", "parity::golden::"),
        train("main_job", "--steps", "10"),
        layer(16384),
        pytorch(machine, "pytorch_128", 128, 4096, 16384, 32768),
        tests("kernels", 180, "kernels", "--skip", "on_the_fake_driver", ULYSSES_TEST_SEED="all"),
        nccl(machine, 1),
        nccl(machine, 2),
        tests("precision", 90, "engine", "parity::precision::bf16_gradients_of_wide_heads"),
        *(attention(128, tokens, "wgmma") for tokens in (32768, 131072)),
        *(layer(tokens) for tokens in (4096, 32768, 131072)),
        steps("model_1b_32768", 90, "llama-3.2-1b", 32768, *recomputes),
        attention(128, 16384, "tiled"),
        attention(64, 16384, "fused"),
        pytorch(machine, "pytorch_64", 64, 16384),
        Check("bandwidth", 60, ["bin/bench_kernels", "--device", "cuda", "--dtype", "bf16", "--mib", "1024", "--json"], has_figures=True),
        Check("profile", 90, ["bin/ulysses", "bench", "profile", "--device", "cuda", *profile], has_figures=True),
        sanitizer("memcheck"),
        train("offload", "--steps", "3", "--zero-stage", "3", "--set", "bf16.enabled=true", "--set", offloads[0], "--set", offloads[1]),
        tests("collectives_of_threads", 120, "comm", "conformance::threads", "conformance::default_methods_on_a_gpu"),
        tests("exchange_volume", 120, "comm", "exchange_volume::"),
        steps("model_1b_131072", 180, "llama-3.2-1b", 131072, *recomputes),
        over_nccl(machine, "golden_over_nccl", "engine", "parity::golden::"),
        over_nccl(machine, "meshes_over_nccl", "engine", "parity::mesh_invariance::"),
        bench("all_to_all", 90, "all-to-all"),
        tests("all_precision", 300, "engine", "parity::precision::"),
        tests("meshes", 900, "engine", "parity::mesh_invariance::"),
        tests("zero", 900, "engine", "zero::stages::"),
        sanitizer("racecheck"),
        sanitizer("synccheck"),
    ]


def cannot(why: str) -> None:
    print(f"check.py: {why}", file=sys.stderr)
    sys.exit(2)


def find_gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        cannot("this machine has no NVIDIA driver (there is no nvidia-smi), so nothing was run")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    if not gpus:
        cannot("nvidia-smi lists no GPU on this machine, so nothing was run")
    return gpus


def nccl_version() -> tuple[int, ...]:
    """The version that the program loads; () without one."""
    command = ["bin/ulysses", "doctor", "--json", "--mib", "1", "--ranks", "2"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, timeout=120)
        findings = json.loads(done.stdout)["findings"]
        [text] = [finding["text"] for finding in findings if finding["name"] == "NCCL" and finding["state"] == "ok"]
        return tuple(int(part) for part in text.split(",")[0].split("."))
    except (ValueError, KeyError, OSError, subprocess.TimeoutExpired):
        return ()


def sees_gpu_in_torch() -> bool:
    command = ["python3", "-c", "import torch; assert torch.cuda.is_available()"]
    return subprocess.run(command, capture_output=True).returncode == 0


def use_libraries() -> None:
    """Adds this machine's CUDA libraries to LD_LIBRARY_PATH, as libraries.sh does."""
    script = "source ./libraries.sh && printf %s \"$LD_LIBRARY_PATH\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=FOLDER)
    os.environ["LD_LIBRARY_PATH"] = done.stdout


def unpack() -> None:
    if not (FOLDER / "bin").exists():
        with tarfile.open(FOLDER / "bin.tar.xz") as archive:
            archive.extractall(FOLDER, filter="data")


class Report:
    """The results, rewritten after each check."""

    def __init__(self, folder: Path, machine: Machine):
        self.folder, self.path = folder, folder / "report.json"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        earlier = json.loads(self.path.read_text())["checks"] if self.path.exists() else []
        self.results = {result["name"]: result for result in earlier}
        self.machine = machine

    def passed(self, name: str) -> bool:
        return self.results.get(name, {}).get("status") == "passed"

    def count(self, status: str) -> int:
        return sum(result["status"] == status for result in self.results.values())

    def add(self, check: Check, status: str, reason: str = "", seconds: float = 0) -> None:
        log, figures = self.log(check.name, "err"), None
        text = log.read_text(errors="replace") if log.exists() else ""
        if check.has_figures and status == "passed":
            figures = [json.loads(part) for part in json_objects(self.log(check.name, "out").read_text())]
        elif self.log(check.name, "out").exists():
            text += self.log(check.name, "out").read_text(errors="replace")
        self.results[check.name] = {
            "name": check.name,
            "status": status,
            "reason": reason,
            "seconds": round(seconds),
            "command": " ".join(check.command),
            "output": "\n".join(text.splitlines()[-OUTPUT_LINES:]),
            "figures": figures,
        }
        self.write()
        print(f"{status:9} {check.name} {f'({reason})' if reason else ''} {seconds:.0f} s", file=sys.stderr, flush=True)

    def log(self, name: str, stream: str) -> Path:
        return self.folder / "logs" / f"{name}.{stream}"

    def write(self) -> None:
        report = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "build": (FOLDER / "BUILD").read_text().strip(),
            "devices": self.machine.gpus,
            "nccl": ".".join(map(str, self.machine.nccl)),
            **{status.replace(" ", "_"): self.count(status) for status in ("passed", "failed", "not run")},
            "checks": list(self.results.values()),
        }
        replace(self.path, lambda new: new.write_text(json.dumps(report, indent=1)))
        replace(self.folder / "logs.tar.gz", self.archive)

    def archive(self, new: Path) -> None:
        with tarfile.open(new, "w:gz") as archive:
            archive.add(self.folder / "logs", "logs")


def replace(path: Path, write) -> None:
    """Whoever takes the machine away finds the old file or the new one."""
    new = path.with_name(path.name + ".new")
    write(new)
    new.rename(path)


def json_objects(text: str) -> list[str]:
    """One object over many lines, or one per line."""
    text = text.strip()
    return [text] if "\n{" not in text else text.splitlines()


def run(check: Check, report: Report, seconds: float) -> None:
    """Runs a check for at most so many seconds, and all its processes."""
    started = time.monotonic()
    with open(report.log(check.name, "out"), "wb") as out, open(report.log(check.name, "err"), "wb") as err:
        environment = {**os.environ, "CARGO_MANIFEST_DIR": str(FOLDER), "RUST_TEST_THREADS": "8", **check.environment}
        process = subprocess.Popen(
            check.command, cwd=FOLDER, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    taken = time.monotonic() - started
    output = report.log(check.name, "out").read_text(errors="replace")
    if code is None and seconds < check.limit:
        report.add(check, "not run", f"cut after {seconds:.0f} s, where --minutes ended", taken)
    elif code is None:
        report.add(check, "failed", f"not done after {check.limit} s", taken)
    elif code != 0:
        report.add(check, "failed", f"exit code {code}", taken)
    elif "running 0 tests" in output:
        report.add(check, "not run", "the folder's build has no such tests", taken)
    else:
        report.add(check, "passed", seconds=taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, default=FOLDER / "results")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many minutes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of the checks to run")
    parser.add_argument("--again", action="store_true", help="repeat what passed")
    args = parser.parse_args()
    end = time.monotonic() + args.minutes * 60
    gpus = find_gpus()
    use_libraries()
    unpack()
    machine = Machine(gpus, nccl_version(), sees_gpu_in_torch())
    report = Report(args.results.resolve(), machine)
    for check in all_checks(machine):
        left = end - time.monotonic()
        binary = FOLDER / check.command[0]
        if not any(fnmatch.fnmatch(check.name, pattern) for pattern in args.only):
            continue
        if report.passed(check.name) and not args.again:
            print(f"{check.name} passed before", file=sys.stderr)
        elif check.missing:
            report.add(check, "not run", check.missing)
        elif check.command[0].startswith("bin/") and not binary.exists():
            report.add(check, "not run", f"not built: the folder has no {check.command[0]}")
        elif left < LEAST_SECONDS:
            report.add(check, "not run", "no time was left")
        else:
            run(check, report, min(check.limit, left))
    passed, failed, not_run = (report.count(status) for status in ("passed", "failed", "not run"))
    print(f"{passed} passed, {failed} failed, {not_run} not run: {report.path}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
