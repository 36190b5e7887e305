"""Prints how far results of `ulysses verify`, and those of transformers in f32, are from those of transformers in f64.

Usage: compare.py CONFIG.json STEPS BATCH.safetensors (MODEL_DIR RESULTS.safetensors)...

A batch with `position_ids` has several documents in a sequence; transformers gets each alone. Prints a list for each pair: the largest error of the loss, the logits, the gradients and the parameters after the steps, relative to
the largest entry of the tensor. A gradient's largest entry counts as a hundredth of the model's largest at least: smaller ones may be
rounding.
"""

import functools
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

config, steps, batch, *pairs = sys.argv[1:]
config = json.loads(Path(config).read_text())
batch = load_file(batch)
ids = batch["input_ids"]
# Of each sequence the places where documents begin, and its end.
starts = [
    [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)] for positions in batch.get("position_ids", [])
]
labels = ids[:, 1:].clone()
for row, ends in enumerate(starts):
    labels[row, [end - 1 for end in ends[1:-1]]] = -100


def loaded(model_dir):
    is_larger = hasattr(AutoConfig.from_pretrained(model_dir), "text_config")
    auto = AutoModelForImageTextToText if is_larger else AutoModelForCausalLM
    return auto.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


def logits_of(model):
    def of_tokens(tokens):
        return model(input_ids=tokens, use_cache=False).logits

    def of_sequence(row, ends):
        return torch.cat([of_tokens(ids[row : row + 1, begin:end]) for begin, end in zip(ends, ends[1:])], dim=1)

    return torch.cat([of_sequence(row, ends) for row, ends in enumerate(starts)]) if starts else of_tokens(ids)


def trained(model):
    """Returns loss, logits and gradients of a model on the batch, and its parameters after the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    results = {}
    for _ in range(int(steps)):
        logits = logits_of(model)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        loss.backward()
        trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
        if not results:
            results = {"loss": loss.detach().reshape(1), "logits": logits.detach()}
            results |= {f"grad.{name}": parameter.grad.clone() for name, parameter in trainable}
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
    # Of the constants that are stored with the weights, those of the layers.
    constants = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    results |= {f"param.{name}": parameter.detach() for name, parameter in trainable + constants}
    return named(results)


def named(results):
    """Returns results in f64 by name: files have some names that models have not, or those of the language model alone."""
    others = {"language_model.": "", "embed_out.": "lm_head.", "backbone.": "model.", "forget_gate.": ""}
    plain = {name: functools.reduce(lambda name, other: name.replace(*other), others.items(), name) for name in results}
    results = {plain[name]: tensor.double() for name, tensor in results.items()}
    # Files of Kimi Linear have three.
    for name in [name for name in results if name.endswith("self_attn.conv1d.weight")]:
        parts = zip("qkv", results.pop(name).chunk(3))
        results |= {name.replace("conv1d", f"{part}_conv1d"): weight for part, weight in parts}
    return results


@functools.cache
def in_f32_and_f64(model_dir):
    in_f32, model = trained(loaded(model_dir)), loaded(model_dir).double()
    # Norms, softmax and rotary embeddings are in f32 whatever the dtype of the model: here f32 is f64.
    with mock.patch.multiple(torch, float32=torch.float64, float=torch.float64), mock.patch.object(
        torch.Tensor, "float", torch.Tensor.double
    ):
        torch.set_default_dtype(torch.float64)
        for module in model.modules():
            # That of GPT-J does not keep its configuration.
            is_of_text = hasattr(module, "config") or type(module).__name__.startswith("GPTJ")
            if type(module).__name__.endswith("RotaryEmbedding") and is_of_text:
                module.__init__(getattr(module, "config", model.config))
        torch.set_default_dtype(torch.float32)
        return in_f32, trained(model)


def errors(results, expected):
    """Returns the largest error of each kind of result."""
    assert results.keys() == expected.keys(), results.keys() ^ expected.keys()
    least = max(tensor.abs().max() for name, tensor in expected.items() if name.startswith("grad.")) / 100
    largest = {}
    for name, tensor in expected.items():
        kind = name.split(".")[0]
        assert results[name].shape == tensor.shape, (name, results[name].shape, tensor.shape)
        scale = max(tensor.abs().max(), least if kind == "grad" else 0)
        error = ((results[name] - tensor).abs().max() / scale).item()
        largest[kind] = max(largest.get(kind, (0, "")), (error, name))
    return largest


report = []
for model_dir, file in zip(pairs[::2], pairs[1::2]):
    in_f32, in_f64 = in_f32_and_f64(model_dir)
    ours = errors(named(load_file(file)), in_f64)
    theirs = errors(in_f32, in_f64)
    report.append([{"tensor": ours[kind][1], "ours": ours[kind][0], "transformers": theirs[kind][0]} for kind in ours])
    assert in_f64["logits"].abs().max() > 1, "the logits must not be tiny"
print(json.dumps(report))
