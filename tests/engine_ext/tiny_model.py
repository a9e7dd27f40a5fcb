"""A tiny random Llama with a tokenizer of single characters, as a Hugging Face folder.

Owns what the builder's tests prefill with. Refuses weights that mean anything.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS = "<s>"
MAX_POSITIONS = 400
_SIGNS = [BOS, *(chr(code) for code in (10, *range(32, 127)))]
NUM_SIGNS = len(_SIGNS)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' + m.content + '[end]' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
FOLDING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if loop.first and "
    "messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ m.content }}{% endfor %}"
)


def save_tiny_model(
    target: Path, *, template: str = TEMPLATE, num_kv_heads: int = 2, head_dim: int = 8
) -> Path:
    """Two layers, four query heads, context `MAX_POSITIONS`; equal each time."""
    save_tiny_tokenizer(target, template=template)
    config = LlamaConfig(
        vocab_size=NUM_SIGNS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        LlamaForCausalLM(config).save_pretrained(target)
    return target


def save_tiny_tokenizer(target: Path, *, template: str = TEMPLATE) -> None:
    """One token for each printable ASCII character, and one for the beginning."""
    vocabulary = {sign: index for index, sign in enumerate(_SIGNS)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
