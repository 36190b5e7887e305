"""ulysses compared with PyTorch and DeepSpeed-Ulysses on the same cores, in turns: `just bench-peer`.

Both sides train the same model from the same weights on the same batch, in f32 or bf16, with AdamW and clipping, on the
same mesh and with the same number of threads. Their losses are compared, so that both do the same work. Time is that of
whole steps, without the first two of a run; a ratio is the median of the ratios of the repetitions.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from model import hf_config, initial_weights
from ranks import run_ranks
from train import CLIP, HYPERPARAMETERS

ROOT = Path(__file__).resolve().parents[2]
ULYSSES = ROOT / "target" / "release" / "ulysses"

# Maximum relative difference of the losses. bf16 rounds at different places on both sides.
LOSS_TOLERANCE = {"f32": 1e-3, "bf16": 1e-2}
# Steps of the first repetition, which compares losses; the others measure fewer.
STEPS, STEPS_OF_OTHERS, WARM_UP = 10, 6, 2

COLLECTIVES_MIB = 16


@dataclass(frozen=True)
class Case:
    """A cell of the table."""

    size: str
    seq_len: int
    dp: int
    sp: int
    dtype: str = "f32"

    def __str__(self):
        return f"{self.size}-{self.seq_len}-{self.dp}x{self.sp}-{self.dtype}"

    @property
    def world_size(self):
        return self.dp * self.sp

    @property
    def threads(self):
        return max(1, (os.cpu_count() or 1) // self.world_size)

    @property
    def zero_stage(self):
        return 0 if self.world_size == 1 else 1

    @property
    def tokens(self):
        """Of a step."""
        return self.dp * self.seq_len


CASES = (
    [Case("small", 2048, dp, sp) for dp, sp in [(1, 1), (1, 2), (2, 1), (2, 2)]]
    + [Case("base", 4096, 1, sp) for sp in (1, 2)]
    + [Case("small", 16384, 1, sp) for sp in (1, 2)]
    + [Case(size, seq_len, 1, sp, "bf16") for size, seq_len in [("small", 2048), ("base", 4096)] for sp in (1, 2)]
)


def write_inputs(case, folder):
    """The weights in Hugging Face's layout, and as many bytes of text as a step has tokens."""
    model = folder / case.size
    if not model.exists():
        model.mkdir()
        save_file(initial_weights(case.size), model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(hf_config(case.size)))
    sources = sorted(path for path in (ROOT / "src").rglob("*.rs"))
    text = b"".join(path.read_bytes() for path in sources)[: case.tokens]
    data = folder / f"{case.tokens}.txt"
    data.write_bytes(text)
    return model, data


def run_ulysses(ulysses, case, model, data, steps, folder):
    """Seconds and losses of every step."""
    config = {
        "train_batch_size": case.dp,
        "train_micro_batch_size_per_gpu": 1,
        "mesh_param": [case.dp, case.sp],
        "zero_optimization": {"stage": case.zero_stage},
        "optimizer": {"type": "AdamW", "params": HYPERPARAMETERS},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": case.dtype == "bf16"},
        "ulysses": {"seq_len": case.seq_len},
    }
    path, output = folder / "config.json", folder / "run"
    path.write_text(json.dumps(config))
    shutil.rmtree(output, ignore_errors=True)
    command = [ulysses, "train", path, "--model", model, "--data", data, "--steps", steps, "--output", output]
    command += ["--threads-per-rank", case.threads]
    call(command)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": [line["step_seconds"] for line in lines], "losses": [line["loss"] for line in lines]}


def run_peer(case, model, data, steps, preload):
    arguments = [case.size, model / "model.safetensors", data, "--dp", case.dp, "--sp", case.sp]
    arguments += ["--seq-len", case.seq_len, "--steps", steps, "--zero-stage", case.zero_stage]
    if case.dtype == "bf16":
        arguments.append("--bf16")
    return run_ranks("train.py", arguments, case.world_size, case.threads, preload)


def share_of_gemm(ulysses, case, repeats):
    """The model's FLOPs per second over those of a square product by the same threads."""
    command = [ulysses, "bench", "train", "--model", case.size, "--mesh", f"{case.dp}x{case.sp}"]
    command += ["--seq-len", case.seq_len, "--zero-stage", case.zero_stage, "--dtype", case.dtype]
    command += ["--threads-per-rank", case.threads, "--repeats", repeats, "--json"]
    return json.loads(call(command))["ratios"]["train_step / square_gemm"]


def call(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_losses(case, ours, peers):
    """The largest relative difference of the losses, which must be small."""
    differences = [abs(own - peer) / abs(peer) for own, peer in zip(ours, peers, strict=True)]
    if max(differences) > LOSS_TOLERANCE[case.dtype]:
        raise SystemExit(f"{case}: the losses differ by {max(differences):.1e}:\nulysses {ours}\npeer    {peers}")
    return max(differences)


def compare(ulysses, case, repeats, preload, folder):
    model, data = write_inputs(case, folder)
    rates = {"ulysses": [], "peer": []}
    difference = 0.0
    for repeat in range(repeats):
        steps = STEPS if repeat == 0 else STEPS_OF_OTHERS
        ours = run_ulysses(ulysses, case, model, data, steps, folder)
        peer = run_peer(case, model, data, steps, preload)
        difference = max(difference, check_losses(case, ours["losses"], peer["losses"]))
        for name, run in (("ulysses", ours), ("peer", peer)):
            rates[name].append(case.tokens / statistics.median(run["seconds"][WARM_UP:]))
    ratios = [own / peer for own, peer in zip(rates["ulysses"], rates["peer"])]
    return {
        "case": str(case),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "share_of_gemm": share_of_gemm(ulysses, case, repeats),
        "loss_difference": difference,
    }


def compare_collectives(ulysses, ranks, repeats, preload):
    """Milliseconds of either side by collective, and the median ratios."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    command = [ulysses, "bench", "collectives", "--ranks", ranks, "--mib", COLLECTIVES_MIB, "--json"]
    command += ["--threads-per-rank", threads]
    turns = []
    for _ in range(repeats):
        ours = json.loads(call(command))["figures"]
        gloo = run_ranks("collectives.py", [COLLECTIVES_MIB], ranks, threads, preload)
        turns.append({name: (ours[name]["ms"], milliseconds) for name, milliseconds in gloo.items()})
    return [
        {
            "collective": name,
            "ranks": ranks,
            "mib": COLLECTIVES_MIB,
            "ulysses_ms": statistics.median(turn[name][0] for turn in turns),
            "gloo_ms": statistics.median(turn[name][1] for turn in turns),
            "ratio": statistics.median(turn[name][1] / turn[name][0] for turn in turns),
        }
        for name in turns[0]
    ]


def mkl_avx512(folder):
    """A library that, loaded first, puts MKL on its AVX-512 path on CPUs of other vendors than Intel."""
    source, library = folder / "mkl.c", folder / "libmkl.so"
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def print_case(row):
    rates = row["tokens_per_second"]
    print(
        f"{row['case']:<24} {row['ratio']:>6.2f} {rates['ulysses']:>9.0f} {rates['peer']:>9.0f}"
        f" {row['share_of_gemm']:>8.2f} {row['loss_difference']:>9.1e}",
        flush=True,
    )


def print_collective(row):
    name = f"{row['collective']}, {row['ranks']} ranks"
    print(f"{name:<24} {row['ratio']:>6.2f} {row['ulysses_ms']:>9.2f} {row['gloo_ms']:>9.2f}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", help="parts of the names of cells, or `collectives`; all without any")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of either side")
    parser.add_argument("--ulysses", type=Path, default=ULYSSES, help="the program; target/release/ulysses without it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--mkl-avx512", action="store_true", help="put the peer's MKL on AVX-512 on AMD; it is there on Intel"
    )
    return parser.parse_args()


def main():
    args = arguments()

    def chosen(name):
        return not args.filters or any(part in name for part in args.filters)

    cases = [case for case in CASES if chosen(str(case))]
    ranks = [2, 4] if chosen("collectives") else []
    if not cases and not ranks:
        names = ", ".join([*map(str, CASES), "collectives"])
        raise SystemExit(f"no cell matches {' '.join(args.filters)}: there are {names}")
    load = os.getloadavg()[0]
    results = {"processor": processor(), "cores": os.cpu_count(), "load": load, "training": [], "collectives": []}
    print(f"{results['processor']}, {results['cores']} core(s), load {load:.1f} at the start\n")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        preload = mkl_avx512(folder) if args.mkl_avx512 else None
        if cases:
            print(f"{'tokens per second':<24} {'ratio':>6} {'ulysses':>9} {'peer':>9} {'of GEMM':>8} {'loss diff':>9}")
        for case in cases:
            results["training"].append(compare(args.ulysses, case, args.repeats, preload, folder))
            print_case(results["training"][-1])
        if ranks:
            print(f"\n{'milliseconds':<24} {'ratio':>6} {'ulysses':>9} {'gloo':>9}")
        for world_size in ranks:
            rows = compare_collectives(args.ulysses, world_size, args.repeats, preload)
            results["collectives"] += rows
            for row in rows:
                print_collective(row)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
