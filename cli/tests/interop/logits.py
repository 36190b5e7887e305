"""Prints the error of given logits of a model, compared with transformers.

Usage: logits.py MODEL_DIR BATCH.safetensors OUTPUT.safetensors

The error is relative to the largest logit, as everywhere in this project's tests.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

model_dir, batch, output = sys.argv[1:]
is_larger = hasattr(AutoConfig.from_pretrained(model_dir), "text_config")
auto = AutoModelForImageTextToText if is_larger else AutoModelForCausalLM
model = auto.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
ours = load_file(output)["logits"].double()
with torch.no_grad():
    theirs = model(input_ids=load_file(batch)["input_ids"]).logits.double()
assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
largest = theirs.abs().max()
print(json.dumps({"largest": largest.item(), "error": ((ours - theirs).abs().max() / largest).item()}))
