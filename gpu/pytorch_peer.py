"""PyTorch on the same GPU and the same shapes as `ulysses bench`, for comparison.

    python3 pytorch_peer.py --num-heads 32 --num-kv-heads 8 --head-dim 128 --seq-len 4096 16384 [--device cpu] --json

Prints one JSON object per length. Bandwidths count every byte that must be read or written once; rates of attention count 4 (forward)
and 10 (backward) floating point operations per visible pair and head element.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

try:
    import flash_attn_interface  # FlashAttention 3, from the folder `hopper` of its repository
except ImportError:
    flash_attn_interface = None

REPEATS = 5
# A layer of Llama 3 8B.
HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 256


def median_seconds(run, device: str) -> float:
    """Returns the median of several runs after one warm-up, each between device synchronizations."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(REPEATS + 1):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


def elementwise(device: str, rows: int) -> dict:
    """GB/s of memory-bound operations in bf16, with a plain copy of the same tensor first."""
    x = torch.randn(rows, HIDDEN, device=device, dtype=torch.bfloat16)
    y, weight = torch.empty_like(x), torch.ones(HIDDEN, device=device, dtype=x.dtype)
    heads = x.view(rows, -1, 64)
    passes = {
        "copy": (2, lambda: y.copy_(x)),
        "transpose_heads": (2, lambda: heads.transpose(0, 1).contiguous()),
        "rms_norm": (2, lambda: F.rms_norm(x, (HIDDEN,), weight)),
        "swiglu": (3, lambda: F.silu(x) * y),
    }
    size = x.numel() * x.element_size()
    return {name: tensors * size / median_seconds(run, device) * 1e-9 for name, (tensors, run) in passes.items()}


def sdpa(q, k, v):
    """Causal attention on [batch, seq, heads, head_dim], by PyTorch's own choice of kernel."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def sdpa_of(backend: SDPBackend):
    """`sdpa` by one of PyTorch's kernels."""

    def run(q, k, v):
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return run


def flash_attention_3(q, k, v):
    """FlashAttention 3, whose older releases return the output with the log-denominators."""
    out = flash_attn_interface.flash_attn_func(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out


def attention(run, device: str, args: argparse.Namespace, seq_len: int) -> dict:
    """TFLOP/s of causal attention on one sequence in bf16."""

    def random(heads: int) -> torch.Tensor:
        shape = (1, seq_len, heads, args.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = random(args.num_heads), random(args.num_kv_heads), random(args.num_kv_heads)
    pair_elems = args.num_heads * args.head_dim * seq_len * (seq_len + 1) / 2
    with torch.no_grad():
        forward = median_seconds(lambda: run(q, k, v), device)
    out = run(q, k, v)
    upstream = torch.randn_like(out)
    backward = median_seconds(
        lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True), device
    )
    return {
        "forward_tflop_per_s": 4 * pair_elems / forward * 1e-12,
        "backward_tflop_per_s": 10 * pair_elems / backward * 1e-12,
    }


class Block(torch.nn.Module):
    """A decoder layer."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = torch.nn.Linear(HIDDEN, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = torch.nn.Linear(self.heads * self.head_dim, HIDDEN, bias=False)
        self.gate_up = torch.nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down = torch.nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, heads, head_dim]
        half = self.head_dim // 2
        frequencies = 500_000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, hidden]
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        x = x + self.out(sdpa(self.rotated(q), self.rotated(k), v).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def layer_step(device: str, args: argparse.Namespace, seq_len: int) -> dict:
    """One training step of a model of one layer on one sequence: forward, backward, clipping, AdamW; bf16 by autocast."""
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    layers = [torch.nn.Embedding(VOCAB, HIDDEN), Block(args), torch.nn.RMSNorm(HIDDEN), head]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(VOCAB, (1, seq_len + 1), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = median_seconds(step, device)
    return {"ms": seconds * 1e3, "tokens_per_second": seq_len / seconds}


def square_gemm(device: str) -> dict:
    """The rate of a large product of random bf16 matrices, the ceiling of all others."""
    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {"size": size, "tflop_per_s": 2 * size**3 / median_seconds(lambda: a @ b, device) * 1e-12}


def or_error(measure, *args):
    """The figures, or the error: one kernel that does not support a shape ends nothing."""
    try:
        return measure(*args)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[4096])
    parser.add_argument("--json", action="store_true", help="no effect: the output always is JSON")
    args = parser.parse_args()
    device = args.device
    kernels = {"sdpa": sdpa}
    if device == "cuda":
        kernels["sdpa_flash"] = sdpa_of(SDPBackend.FLASH_ATTENTION)
        kernels["sdpa_cudnn"] = sdpa_of(SDPBackend.CUDNN_ATTENTION)
    if flash_attn_func and device == "cuda":
        kernels["flash_attention"] = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    if flash_attn_interface and device == "cuda":
        kernels["flash_attention_3"] = flash_attention_3
    for seq_len in args.seq_len:
        report = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "seq_len": seq_len,
            "square_gemm": square_gemm(device),
            "attention": {
                name: or_error(attention, run, device, args, seq_len) for name, run in kernels.items()
            },
            "layer_step": or_error(layer_step, device, args, seq_len),
            "gb_per_s": elementwise(device, seq_len),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
