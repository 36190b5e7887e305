"""The model that both sides train, in PyTorch: Llama with Hugging Face's names of parameters."""

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {
    # The presets of `ulysses --model`: hidden size, layers, feed-forward size; 8 heads each.
    "small": (256, 4, 688),
    "base": (512, 6, 1376),
}
NUM_HEADS = 8
VOCAB_SIZE = 256


def hf_config(size):
    """The `config.json` that goes with the weights."""
    hidden, layers, intermediate = SIZES[size]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1 << 20,
    }


class RmsNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def rotate(x, cos, sin):
    """Rotary embedding of `x [batch, seq, heads, head_dim]`, in halves as Hugging Face does it."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class CausalAttention(nn.Module):
    """PyTorch's fused attention over `[batch, seq, heads, head_dim]`."""

    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, hidden, core):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.core = core

    def forward(self, x, cos, sin):
        heads = (*x.shape[:2], NUM_HEADS, -1)
        q = rotate(self.q_proj(x).view(heads), cos, sin)
        k = rotate(self.k_proj(x).view(heads), cos, sin)
        return self.o_proj(self.core(q, k, self.v_proj(x).view(heads)).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden, intermediate, core):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(hidden, core), Mlp(hidden, intermediate)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden), RmsNorm(hidden)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, hidden, layers, intermediate, make_core):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, hidden)
        self.layers = nn.ModuleList(Layer(hidden, intermediate, make_core()) for _ in range(layers))
        self.norm = RmsNorm(hidden)


class Llama(nn.Module):
    """`make_core` makes a layer's attention: `CausalAttention`, or DeepSpeed's distributed one around it."""

    def __init__(self, size, make_core=CausalAttention):
        super().__init__()
        hidden, layers, intermediate = SIZES[size]
        self.model = Decoder(hidden, layers, intermediate, make_core)
        self.lm_head = nn.Linear(hidden, VOCAB_SIZE, bias=False)

    def forward(self, tokens, labels, cos, sin, num_labels):
        """The token losses of this rank's `tokens [batch, seq_local]`, divided by the `num_labels` of the sequence."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.model.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_labels


def rotary_tables(positions, size):
    """Cosines and sines, `[1, seq, 1, head_dim / 2]`."""
    head_dim = SIZES[size][0] // NUM_HEADS
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(positions.float(), frequencies)[None, :, None, :]
    return angles.cos(), angles.sin()


def initial_weights(size, seed=1):
    """Normal with deviation 0.02, norms 1."""
    model = Llama(size)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
