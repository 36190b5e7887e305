"""PyTorch benchmarks on the same GPU, for comparison: `python3 pytorch_peer.py [--device cpu]`.

Prints one JSON object per line. Bandwidths count every byte that must be read or written once; rates of
attention count 4 (forward) and 10 (backward) floating point operations per visible pair and head element.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F

REPEATS = 20


def best_seconds(run, device: str) -> float:
    """Returns the best of several runs, each between device synchronizations."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(REPEATS):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def report(name: str, dtype: torch.dtype, seconds: float, **figures) -> None:
    print(json.dumps({"name": name, "dtype": str(dtype).removeprefix("torch."), "ms": seconds * 1e3, **figures}))


def bandwidth(name: str, dtype: torch.dtype, device: str, num_bytes: int, run) -> None:
    seconds = best_seconds(run, device)
    report(name, dtype, seconds, gb_per_s=num_bytes / seconds * 1e-9)


def elementwise(dtype: torch.dtype, device: str, rows: int, d: int) -> None:
    """Memory-bound operations, with a plain copy of the same tensor first."""
    x = torch.randn(rows, d, device=device, dtype=dtype)
    y, weight = torch.empty_like(x), torch.ones(d, device=device, dtype=dtype)
    size = x.numel() * x.element_size()
    heads = x.view(rows, d // 64, 64)
    bandwidth("copy", dtype, device, 2 * size, lambda: y.copy_(x))
    bandwidth("transpose_heads", dtype, device, 2 * size, lambda: heads.transpose(0, 1).contiguous())
    bandwidth("rms_norm", dtype, device, 2 * size, lambda: F.rms_norm(x, (d,), weight))
    bandwidth("swiglu", dtype, device, 3 * size, lambda: F.silu(x) * y)


def attention(dtype: torch.dtype, device: str, seq_len: int, heads: int = 16, head_dim: int = 64) -> None:
    """Causal attention on one sequence."""
    shape = (1, heads, seq_len, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    flops = heads * head_dim * seq_len * (seq_len + 1) / 2
    with torch.no_grad():
        seconds = best_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    report("attention_forward", dtype, seconds, seq_len=seq_len, tflop_per_s=4 * flops / seconds * 1e-12)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    upstream = torch.randn_like(out)
    seconds = best_seconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True), device)
    report("attention_backward", dtype, seconds, seq_len=seq_len, tflop_per_s=10 * flops / seconds * 1e-12)


class Block(torch.nn.Module):
    """A Llama-style layer of the preset `base`: hidden size 512, 8 heads, SwiGLU size 1376."""

    def __init__(self, d: int = 512, heads: int = 8, ffn: int = 1376):
        super().__init__()
        self.heads, self.head_dim = heads, d // heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(d) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(d, 3 * d, bias=False), torch.nn.Linear(d, d, bias=False)
        self.gate_up, self.down = torch.nn.Linear(d, 2 * ffn, bias=False), torch.nn.Linear(ffn, d, bias=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:  # [batch, heads, seq, head_dim]
        half = self.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, d]
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, self.head_dim))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def train_step(dtype: torch.dtype, device: str, seq_len: int, vocab: int = 256, d: int = 512) -> None:
    """One step of the preset `base` on one sequence: forward, backward, clipping, AdamW. bf16 by autocast."""
    layers = [torch.nn.Embedding(vocab, d), *(Block() for _ in range(6))]
    model = torch.nn.Sequential(*layers, torch.nn.RMSNorm(d), torch.nn.Linear(d, vocab, bias=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(vocab, (1, seq_len + 1), device=device)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = best_seconds(step, device)
    report("train_step_base", dtype, seconds, seq_len=seq_len, tokens_per_s=seq_len / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    rows, seq_len = (32768, 16384) if device == "cuda" else (1024, 512)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "device": where}))
    for dtype in (torch.float32, torch.bfloat16):
        elementwise(dtype, device, rows, 4096)
        attention(dtype, device, seq_len)
        train_step(dtype, device, seq_len)


if __name__ == "__main__":
    main()
