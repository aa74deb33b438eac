"""Every family equals the reference implementation on tiny random checkpoints: unpacked, packed, and over the cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from polyhead.models.architectures import FAMILIES, rename_weight
from polyhead.models.network.heads import LanguageHead, SequenceHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40]]
BERT = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
LLAMA = dict(BERT, num_key_value_heads=2, max_position_embeddings=64)
GEMMA = dict(LLAMA, head_dim=16, query_pre_attn_scalar=24, num_hidden_layers=3, sliding_window=4)
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip

CASES: dict[str, tuple[Any, Any]] = {
    "bert": (tf.BertConfig(**BERT, max_position_embeddings=64), tf.BertModel),
    "bert-tanh": (tf.BertConfig(**BERT, max_position_embeddings=64, hidden_act="gelu_new"), tf.BertModel),
    "roberta": (tf.RobertaConfig(**BERT, max_position_embeddings=66, type_vocab_size=1), tf.RobertaModel),
    "xlm-roberta": (tf.XLMRobertaConfig(**BERT, max_position_embeddings=66, type_vocab_size=1), tf.XLMRobertaModel),
    "distilbert": (
        tf.DistilBertConfig(vocab_size=97, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64),
        tf.DistilBertModel,
    ),
    "gpt2": (tf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64), tf.GPT2LMHeadModel),
    "openai-gpt": (
        tf.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        tf.OpenAIGPTLMHeadModel,
    ),
    "llama": (tf.LlamaConfig(**LLAMA), tf.LlamaForCausalLM),
    "llama-biased-tied": (
        tf.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        tf.LlamaForCausalLM,
    ),
    "llama-linear": (
        tf.LlamaConfig(**LLAMA, rope_parameters=dict(rope_type="linear", rope_theta=5e3, factor=2.0)),
        tf.LlamaForCausalLM,
    ),
    "llama-3": (tf.LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROPE), tf.LlamaForCausalLM),
    "mistral-window": (tf.MistralConfig(**LLAMA, sliding_window=3), tf.MistralForCausalLM),
    "qwen2": (tf.Qwen2Config(**LLAMA), tf.Qwen2ForCausalLM),
    "qwen2-window": (
        tf.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=3, max_window_layers=1),
        tf.Qwen2ForCausalLM,
    ),
    "qwen3": (tf.Qwen3Config(**LLAMA, head_dim=16), tf.Qwen3ForCausalLM),
    "gemma3": (tf.Gemma3TextConfig(**GEMMA, layer_types=GEMMA_LAYERS), tf.Gemma3ForCausalLM),
    "gemma3-pattern": (tf.Gemma3TextConfig(**dict(GEMMA, num_hidden_layers=7)), tf.Gemma3ForCausalLM),
}
CAUSAL = [name for name, (_, kind) in CASES.items() if "CausalLM" in kind.__name__ or "LMHead" in kind.__name__]


# Families of which transformers has no class.
PUBLISHED_FAMILIES = ("new", "neobert", "internlm2", "internlm3", "minicpm", "baichuan")
CONFIG = FAMILIES["bert"].config(CASES["bert"][0].to_dict())


def build(name: str) -> tuple[Any, Transformer, LanguageHead | None]:
    """The reference model with large random weights, and our network and head with the same weights."""
    torch.manual_seed(0)
    config, kind = CASES[name]
    config._attn_implementation = "eager"
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    family = FAMILIES[config.model_type]
    ours = Transformer(family.config(config.to_dict())).eval()
    spec = family.heads[kind.__name__]
    weights = dict(
        piece for key, value in theirs.state_dict().items() for piece in rename_weight(family, spec.renames, key, value)
    )
    head_weights = {key.removeprefix("head."): weights.pop(key) for key in list(weights) if key.startswith("head.")}
    ours.load_state_dict(weights)
    if spec.task != "generate":
        return theirs, ours, None
    head = LanguageHead(ours.config)
    head.load_state_dict(head_weights)
    return theirs, ours, head.eval()


def reference(theirs: Any, sequence: list[int], head: LanguageHead | None) -> torch.Tensor:
    out = theirs(torch.tensor([sequence]))
    return out.last_hidden_state[0] if head is None else out.logits[0]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_packed_sequences_equal_the_reference(name: str) -> None:
    theirs, ours, head = build(name)
    states = ours(RaggedBatch.of(SEQUENCES))
    packed = states if head is None else head(states)
    expected = torch.cat([reference(theirs, sequence, head) for sequence in SEQUENCES])
    scale = max(1.0, float(expected.abs().max()))
    assert float((packed - expected).abs().max()) <= 1e-5 * scale
    alone = ours(RaggedBatch.of(SEQUENCES[:1]))
    assert torch.allclose(alone, states[: len(SEQUENCES[0])], atol=1e-5 * scale)


SEQUENCE_HEADS = {
    "bert": (tf.BertConfig(**BERT, max_position_embeddings=64, num_labels=3), tf.BertForSequenceClassification),
    "roberta": (
        tf.RobertaConfig(**BERT, max_position_embeddings=66, type_vocab_size=1, num_labels=3),
        tf.RobertaForSequenceClassification,
    ),
    "distilbert": (
        tf.DistilBertConfig(vocab_size=97, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3),
        tf.DistilBertForSequenceClassification,
    ),
}


@pytest.mark.parametrize("name", SEQUENCE_HEADS)
@torch.no_grad()
def test_sequence_heads_equal_the_reference(name: str) -> None:
    config, kind = SEQUENCE_HEADS[name]
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    family = FAMILIES[config.model_type]
    ours = Transformer(family.config(config.to_dict())).eval()
    spec = family.heads[kind.__name__]
    head = SequenceHead(ours.config, 3, spec.scoring(config.to_dict()), "softmax")
    weights = dict(
        piece for key, value in theirs.state_dict().items() for piece in rename_weight(family, spec.renames, key, value)
    )
    head.load_state_dict({key.removeprefix("head."): weights.pop(key) for key in list(weights) if "head." in key})
    ours.load_state_dict(weights)
    batch = RaggedBatch.of(SEQUENCES)
    got = head(ours(batch), batch.starts)
    expected = torch.cat([theirs(torch.tensor([sequence])).logits for sequence in SEQUENCES])
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(head.postprocess(got), expected.softmax(-1), atol=1e-5)


def test_families_and_head_names_match_the_reference() -> None:
    """Every architecture of our tables is a class of the reference implementation, or of published code."""
    for family in FAMILIES.values():
        if family.name not in PUBLISHED_FAMILIES:
            for architecture in family.heads:
                known = hasattr(tf, architecture) or architecture in family.published_classes
                assert known, (family.name, architecture)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_output_rows_have_the_states_of_a_full_step(name: str) -> None:
    _, ours, _ = build(name)
    batch = RaggedBatch.of(SEQUENCES)
    for wanted in ([0, 9, 12, 17], [8], list(range(len(batch.tokens)))):
        narrowed = ours(replace(batch, output_rows=torch.tensor(wanted)))
        assert torch.allclose(narrowed, ours(batch)[wanted], atol=1e-5, rtol=1e-5)


SPARSE = {
    "gemma3_text": ({"num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}, 4096),
    "mistral": ({"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}, 4096),
    "qwen2": ({"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 30, "use_sliding_window": True}, 4096),
    "llama": ({"hidden_size": 32, "num_attention_heads": 4, "sliding_window": 7}, 0),
}


@pytest.mark.parametrize("name", SPARSE)
def test_missing_keys_have_the_defaults_of_the_reference(name: str) -> None:
    given, window = SPARSE[name]
    theirs = tf.AutoConfig.for_model(name, **given)
    sizes = ("vocab_size", "intermediate_size", "num_key_value_heads", "max_position_embeddings", "num_hidden_layers")
    ours = FAMILIES[name].config({**{size: getattr(theirs, size) for size in sizes}, **given})
    assert ours.window == window
    layers = [ours.is_windowed(layer) for layer in range(ours.depth)]
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * ours.depth
    assert layers == [kind == "sliding_attention" for kind in kinds]
    rope = theirs.rope_parameters
    assert ours.rope_base == rope.get("full_attention", rope)["rope_theta"]
    if "sliding_attention" in rope:
        assert ours.window_rope_base == rope["sliding_attention"]["rope_theta"]
