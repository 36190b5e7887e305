"""ulysses compared with transformers on the CPU, by family of models, in turns: `just bench-families`.

Both sides train the same model from the same weights on the same tokens, in f32 on one rank with all cores, with AdamW and
clipping, and their losses are compared. Three of four layers of a hybrid have the module that names it, the last one has attention,
as in the published models. Time is that of whole steps, without the first two of a run; a ratio is the median of the ratios of the repetitions.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from compare import ULYSSES, WARM_UP, Case, call, check_losses, processor, run_ulysses
from train import CLIP, HYPERPARAMETERS

LAYERS = 4
SIZES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1 << 16,
    "tie_word_embeddings": False,
}

FAMILIES = {
    "attention": {"model_type": "llama", "intermediate_size": 1376},
    # Heads as in Qwen3.5, a quarter of them.
    "gated delta rule": {
        "model_type": "qwen3_5_text",
        "intermediate_size": 1376,
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    # Heads and states as in Granite 4.0-H.
    "mamba 2": {
        "model_type": "granitemoehybrid",
        "intermediate_size": 1376,
        "layer_types": ["mamba"] * (LAYERS - 1) + ["attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 1376,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
}


@dataclass(frozen=True)
class FamilyCase(Case):
    """A model of a family, on one rank."""

    dp: int = 1
    sp: int = 1


def write_model(options, model):
    """A model that transformers initializes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {**SIZES, **options}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def run_peer(model, data, steps):
    """Seconds and losses of every step of transformers, in a process of its own."""
    command = [sys.executable, __file__, "--peer", model, data, steps]
    return json.loads(call(command).splitlines()[-1])


def peer(model, data, steps):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPERPARAMETERS)
    tokens = torch.tensor([list(Path(data).read_bytes())])
    result = {"seconds": [], "losses": []}
    for _ in range(int(steps)):
        started = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result["losses"].append(loss.item())
        result["seconds"].append(time.perf_counter() - started)
    print(json.dumps(result))


def compare(name, args, folder):
    case = FamilyCase(name, args.seq_len)
    model, data = folder / name.replace(" ", "_"), folder / "data.txt"
    write_model(FAMILIES[name], model)
    data.write_bytes((Path(__file__).read_bytes() * (args.seq_len // 1000 + 1))[: args.seq_len])
    seconds, difference = {"ulysses": [], "transformers": []}, 0.0
    for _ in range(args.repeats):
        ours = run_ulysses(args.ulysses, case, model, data, args.steps, folder)
        theirs = run_peer(model, data, args.steps)
        difference = max(difference, check_losses(case, ours["losses"], theirs["losses"]))
        for side, run in (("ulysses", ours), ("transformers", theirs)):
            seconds[side].append(statistics.median(run["seconds"][WARM_UP:]))
    ratios = [theirs / own for own, theirs in zip(*seconds.values())]
    rates = {side: args.seq_len / statistics.median(times) for side, times in seconds.items()}
    return {"family": name, "ratio": statistics.median(ratios), "ratios": ratios, **rates, "loss_difference": difference}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", help="parts of the names of families; all without any")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of either side")
    parser.add_argument("--ulysses", type=Path, default=ULYSSES, help="the program; target/release/ulysses without it")
    args = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} core(s), load {os.getloadavg()[0]:.1f} at the start\n")
    print(f"{'tokens per second':<20} {'ratio':>6} {'ulysses':>9} {'transformers':>13} {'loss diff':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name in FAMILIES:
            if not args.filters or any(part in name for part in args.filters):
                row = compare(name, args, Path(folder))
                rates = f"{row['ulysses']:>9.0f} {row['transformers']:>13.0f}"
                print(f"{name:<20} {row['ratio']:>6.2f} {rates} {row['loss_difference']:>9.1e}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:])
    else:
        main()
