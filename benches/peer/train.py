"""One rank of the peer: PyTorch alone on one rank, else DeepSpeed with Ulysses and ZeRO over gloo.

Started by `compare.py`. The batch of every step is the whole of DATA: sequence r is for dp rank r, and sp ranks have its
tokens in order. The last token has no label, because the next one is unknown. Prints the seconds and the loss of every
step.
"""

import argparse
import json
import logging
import os
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from model import CausalAttention, Llama, rotary_tables

HYPERPARAMETERS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
IGNORED = -100


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("weights")
    parser.add_argument("data")
    for name in ("dp", "sp", "seq-len", "steps", "zero-stage"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def batch(args, dp_rank, sp_rank):
    """This rank's tokens, their labels and their rotary tables."""
    local = args.seq_len // args.sp
    start = dp_rank * args.seq_len + sp_rank * local
    with open(args.data, "rb") as file:
        tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    labels = torch.cat((tokens[1:], torch.tensor([IGNORED])))
    own = slice(start, start + local)
    positions = torch.arange(sp_rank * local, (sp_rank + 1) * local)
    return tokens[None, own], labels[None, own], *rotary_tables(positions, args.size)


def labels_of_row(args):
    """Tokens with a label, over which the loss is the mean, per sequence."""
    return (args.dp * args.seq_len - 1) / args.dp


def plain_step(args):
    """A step of PyTorch on one rank."""
    model = Llama(args.size)
    model.load_state_dict(load_file(args.weights))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPERPARAMETERS)
    inputs = batch(args, 0, 0)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(*inputs, labels_of_row(args))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def deepspeed_step(args):
    """A step of DeepSpeed: Ulysses over sp, ZeRO over dp."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    mpu, make_core = None, CausalAttention
    if args.sp > 1:
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

        mpu.initialize_sequence_parallel(args.sp)
        group = mpu.get_sequence_parallel_group()

        class Distributed(DistributedAttention):
            def forward(self, q, k, v):
                return super().forward(q, k, v, 0)

        def make_core():
            return Distributed(CausalAttention(), group, scatter_idx=2, gather_idx=1)

    model = Llama(args.size, make_core)
    model.load_state_dict(load_file(args.weights))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": HYPERPARAMETERS},
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": args.bf16},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    rank = dist.get_rank()
    tokens, labels, cos, sin = batch(args, rank // args.sp, rank % args.sp)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    cos, sin = cos.to(dtype), sin.to(dtype)

    def step():
        loss = engine(tokens, labels, cos, sin, labels_of_row(args))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def main():
    args = arguments()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world_size = args.dp * args.sp
    step = plain_step(args) if world_size == 1 else deepspeed_step(args)
    seconds, losses = [], []
    for _ in range(args.steps):
        if world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = torch.tensor([step()], dtype=torch.float64)
        if world_size > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - start)
        if world_size > 1:
            # Each rank's part of the loss of its sequence; the mean over the sequences.
            dist.all_reduce(loss)
        losses.append(loss.item() / args.dp)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
