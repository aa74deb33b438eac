"""Tiny random encoder-decoders as transformers saves them, one of each family, and the same network in transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.support.checkpoints import roberta_bpe

WORDS = 384  # about the size of the tokenizer
SIDES = dict(encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
             encoder_ffn_dim=48, decoder_ffn_dim=40, d_model=32, max_position_embeddings=64)  # fmt: skip
T5 = dict(d_model=32, d_kv=6, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
          relative_attention_num_buckets=8, relative_attention_max_distance=12)  # fmt: skip
ENDS = dict(pad_token_id=1, eos_token_id=2)
OWN = dict(ENDS, decoder_start_token_id=1)
MARIAN = dict(SIDES, **OWN, forced_eos_token_id=2, scale_embedding=True, activation_function="swish")
KINDS: dict[str, tuple[Any, Any]] = {
    "t5": (tf.T5Config(**T5, **OWN, vocab_size=WORDS), tf.T5ForConditionalGeneration),
    "t5-1.1": (
        tf.T5Config(**T5, **OWN, vocab_size=WORDS, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        tf.T5ForConditionalGeneration,
    ),
    "mt5": (tf.MT5Config(**T5, **OWN, vocab_size=WORDS), tf.MT5ForConditionalGeneration),
    "bart": (
        tf.BartConfig(**SIDES, **ENDS, vocab_size=WORDS, bos_token_id=0, forced_bos_token_id=0, forced_eos_token_id=2,
                      decoder_start_token_id=2),
        tf.BartForConditionalGeneration,
    ),
    "bart-scaled": (
        tf.BartConfig(**SIDES, **OWN, vocab_size=WORDS, bos_token_id=0, forced_eos_token_id=None, scale_embedding=True),
        tf.BartForConditionalGeneration,
    ),
    "marian": (tf.MarianConfig(**MARIAN, vocab_size=WORDS), tf.MarianMTModel),
}  # fmt: skip


def translator(folder: Path, kind: str, **writing: object) -> Any:
    """Save one with random weights of a large spread; `writing` is added to its generation_config.json."""
    torch.manual_seed(0)
    config, network = KINDS[kind]
    theirs = network(config).eval()
    if kind == "t5-1.1":
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty_like(theirs.lm_head.weight))
    with torch.no_grad():
        for name, weight in (*theirs.named_parameters(), *theirs.named_buffers()):
            if name.endswith(("shared.weight", "lm_head.weight")):
                weight.normal_()
            elif "embed_positions" not in name or kind.startswith("bart"):
                weight.add_(torch.randn_like(weight) * (0.1 if weight.dim() == 1 else 0.25))
    for key, value in writing.items():
        setattr(theirs.generation_config, key, value)
    theirs.save_pretrained(folder)
    roberta_bpe(WORDS).save_pretrained(folder)
    return theirs
