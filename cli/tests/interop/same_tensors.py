"""Checks that two model directories have the same tensors, and that those that are not of the language model are equal.

Usage: same_tensors.py MODEL_DIR OTHER_DIR
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors(directory):
    return {name: tensor for file in Path(directory).glob("*.safetensors") for name, tensor in load_file(file).items()}


first, second = (tensors(directory) for directory in sys.argv[1:])
assert first.keys() == second.keys(), first.keys() ^ second.keys()
others = [name for name in first if "language_model" not in name and "lm_head" not in name]
assert others, first.keys()
for name in others:
    assert first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]), name
changed = [name for name in first if not torch.equal(first[name], second[name])]
assert changed, "no parameter was trained"
