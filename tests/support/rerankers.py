"""Tiny rerankers that answer yes or no."""

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.support import checkpoints

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
YES, NO = 5, 7
SETTINGS = {
    "transformer_task": "text-generation",
    "modality_config": {"message": {"method": "forward", "method_output_name": "logits", "format": "flat"}},
    "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
}


def reranker(folder: Path, *, tied: bool = False, score: Any = None, **settings: Any) -> Path:
    """A Qwen3 with the files of a cross-encoder."""
    tokenizer = checkpoints.byte_level_bpe()
    tokenizer.chat_template = TEMPLATE
    config = tf.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    checkpoints.save(tf.Qwen3ForCausalLM(config), tokenizer, folder)
    kinds = [("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.LogitScore")]
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds]
    checkpoints.write_json(folder / "modules.json", modules)
    score = {"true_token_id": YES, "false_token_id": NO} if score is None else score
    checkpoints.write_json(folder / "1_LogitScore" / "config.json", score)
    checkpoints.write_json(folder / "sentence_bert_config.json", {**SETTINGS, **settings})
    return folder
