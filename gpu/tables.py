"""Makes the tables of docs/gpu.md from a report of check.sh: `python3 gpu/tables.py report.json [--write docs/gpu.md]`."""

import argparse
import json
import re
from pathlib import Path

BEGIN, END = "<!-- gpu-results: begin -->\n", "<!-- gpu-results: end -->\n"
MISSING = "–"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def at(value, *keys):
    """Returns the value at a path of keys; None if a part is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def lengths(figures: dict, prefix: str) -> list[int]:
    suffixes = [name.removeprefix(prefix) for name in figures if name.startswith(prefix)]
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())


def checks(report: dict) -> str:
    rows = [[check["name"], check["status"], str(check["seconds"]), check["reason"]] for check in report["checks"]]
    return table(["check", "status", "seconds", "reason"], rows)


def attention(figures: dict) -> str:
    """Forward / backward TFLOP/s of causal attention in bf16, 32 query heads, 8 KV heads, head dimension 128: by the
    kernels that `auto` chooses, then by others."""
    prefix = "bench_attention_"
    rows = []
    for seq_len in lengths(figures, prefix):
        row = [str(seq_len)]
        row.append(at(figures[f"bench_attention_{seq_len}"], "settings", "kernels") or MISSING)
        for kernels in ("bench_attention", "bench_fused_attention", "bench_tiled_attention"):
            ours = at(figures.get(f"{kernels}_{seq_len}"), "figures") or {}
            rates = [at(ours, f"{step} bf16", "gflop_per_s") for step in ("forward", "backward")]
            row.append(" / ".join(number(rate and rate / 1e3) for rate in rates))
        for kernel in ("sdpa", "flash_attention", "flash_attention_3"):
            peer = at(figures.get(f"pytorch_{seq_len}"), "attention", kernel)
            row.append(" / ".join(number(at(peer, f"{step}_tflop_per_s")) for step in ("forward", "backward")))
        rows.append(row)
    ours = ["chosen", "ulysses", "ulysses, fused", "ulysses, tiled"]
    return table(["tokens", *ours, "PyTorch SDPA", "FlashAttention 2", "FlashAttention 3"], rows)


def layer(figures: dict) -> str:
    """Tokens/s of a training step of one layer of Llama 3 8B in bf16."""
    rows = []
    for seq_len in lengths(figures, "bench_layer_"):
        ours = at(figures[f"bench_layer_{seq_len}"], "figures", "train_step", "tokens_per_second")
        peer = at(figures.get(f"pytorch_{seq_len}"), "layer_step", "tokens_per_second")
        ratio = ours / peer if ours and peer else None
        rows.append([str(seq_len), number(ours), number(peer), number(ratio)])
    return table(["tokens", "ulysses", "PyTorch", "ratio"], rows)


def tables(report: dict) -> str:
    figures = {check["name"]: check["figures"] for check in report["checks"] if check["figures"]}
    devices = "; ".join(re.sub(r" \(UUID: .*?\)", "", line) for line in report["devices"].strip().splitlines())
    parts = [f"{report['date'][:10]}, {devices}, build {report['build'].splitlines()[0]}\n", checks(report)]
    for make in (attention, layer):
        parts += [f"{make.__doc__}\n", make(figures)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"replaces the text between {BEGIN.strip()} and {END.strip()}")
    args = parser.parse_args()
    text = tables(json.loads(args.report.read_text()))
    if not args.write:
        print(text, end="")
        return
    before, _, rest = args.write.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{args.write}: no {BEGIN.strip()} followed by {END.strip()}")
    args.write.write_text(before + BEGIN + text + END + after)


if __name__ == "__main__":
    main()
