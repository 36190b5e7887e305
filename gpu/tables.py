"""Makes the tables of docs/gpu.md from a report of check.py: `python3 gpu/tables.py report.json [--write docs/gpu.md]`."""

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


def checks(report: dict) -> str:
    rows = [[check["name"], check["status"], str(check["seconds"]), check["reason"]] for check in report["checks"]]
    return table(["check", "status", "seconds", "reason"], rows)


def peers(figures: dict, head_dim: int) -> dict[int, dict]:
    """PyTorch's figures by length."""
    return {at_length["seq_len"]: at_length for at_length in figures.get(f"pytorch_{head_dim}", [])}


def attention(figures: dict) -> str:
    """Forward / backward TFLOP/s of causal attention in bf16, 32 query heads, 8 KV heads."""
    found = [name.split("_") for name in figures if name.startswith("attention_")]
    rows = []
    for head_dim, tokens in sorted({(int(name[2]), int(name[3])) for name in found}):
        row = [str(tokens), str(head_dim)]
        for kernels in ("wgmma", "fused", "tiled"):
            [ours] = figures.get(f"attention_{kernels}_{head_dim}_{tokens}", [{}])
            rates = [at(ours, "figures", f"{step} bf16", "gflop_per_s") for step in ("forward", "backward")]
            row.append(" / ".join(number(rate and rate / 1e3) for rate in rates))
        for kernel in ("sdpa", "sdpa_flash", "sdpa_cudnn"):
            peer = at(peers(figures, head_dim), tokens, "attention", kernel)
            row.append(" / ".join(number(at(peer, f"{step}_tflop_per_s")) for step in ("forward", "backward")))
        rows.append(row)
    kernels = ["wgmma", "fused", "tiled", "PyTorch SDPA", "its FlashAttention-2", "its cuDNN"]
    return table(["tokens", "head_dim", *kernels], rows)


def layer(figures: dict) -> str:
    """Milliseconds of a training step of one layer of Llama 3 8B in bf16."""
    rows = []
    for tokens in sorted(int(name.split("_")[1]) for name in figures if name.startswith("layer_")):
        [ours] = figures[f"layer_{tokens}"]
        step = at(ours, "figures", "train_step")
        peer = at(peers(figures, 128), tokens, "layer_step", "ms")
        rows.append([str(tokens), number(at(step, "ms")), number(at(step, "ms_fastest")), number(peer)])
    return table(["tokens", "ulysses", "fastest", "PyTorch"], rows)


def tables(report: dict) -> str:
    figures = {check["name"]: check["figures"] for check in report["checks"] if check["figures"]}
    devices = "; ".join(re.sub(r" \(UUID: .*?\)", "", line) for line in report["devices"])
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
