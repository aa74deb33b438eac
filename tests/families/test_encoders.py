"""Every encoder family with every head that it is published with equals its reference implementation.

States, scores and logits are compared, by torch and by the compiled step where it supports the network.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import unsupported_reason
from tests.families.conformance import (
    BERT,
    CLOSE,
    LABEL_TASKS,
    LABELS,
    SEPARATOR,
    TEXTS,
    TWO_SCORES,
    Row,
    head_output,
    make_rows,
    read_reference,
    reference_output,
    save_checkpoint,
    save_reference,
)
from tests.support import checkpoints
from tests.support.edits import edited

BODY, TEXT, TAG, SPAN, CHOICE, MASK = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
)
EVERY = (BODY, TEXT, TAG, SPAN, CHOICE, MASK)
PRETRAINED = ("ForNextSentencePrediction", "ForPreTraining")
LLAMA = dict(BERT, num_key_value_heads=2)
GPT2 = dict(n_layer=2, n_head=4, n_embd=32, n_positions=checkpoints.POSITIONS)
GEMMA = dict(LLAMA, head_dim=16, query_pre_attn_scalar=24, sliding_window=4)
MODERN = dict(BERT, num_hidden_layers=4, local_attention=6)
MODERN_BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
DEBERTA = BERT | checkpoints.DISENTANGLED
CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu", "pooler_hidden_act": "gelu"}
LINEAR = {"position_buckets": -1, "max_relative_positions": 24, "norm_rel_ebd": "none", "share_att_key": False}
FIRST = dict(
    BERT, relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"], max_relative_positions=24
)
ROBERTA = dict(BERT, max_position_embeddings=checkpoints.POSITIONS + 1, type_vocab_size=2)
DISTIL = dict(n_layers=2, n_heads=4, dim=32, hidden_dim=48, max_position_embeddings=checkpoints.POSITIONS)
LONGFORMER = dict(ROBERTA, attention_window=8, sep_token_id=SEPARATOR)
PAIRS = tuple(
    (first, f"[SEP] {second}")  # with the two separators of RoBERTa's pairs, and three in all
    for first, second in (("dull", "far too long"), ("A good film? " * 9, TEXTS[1]), (TEXTS[1], "0 1 2 3"), ("0", "1"))
)
GROUPS = {"q_groups": 1, "k_groups": 2, "v_groups": 8, "post_attention_groups": 2, "output_groups": 1}
BIG_BIRD = dict(BERT, block_size=16, num_random_blocks=3, rescale_embeddings=True)
BART = dict(
    d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=40, max_position_embeddings=checkpoints.POSITIONS,
    eos_token_id=SEPARATOR, decoder_start_token_id=SEPARATOR, bos_token_id=2,
)  # fmt: skip
BLOCKS = dict(block_size=16, num_random_blocks=3)
LONG_BART = (
    BART
    | dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), checkpoints.POSITIONS)
    | dict(attention_window=8)
)
IMAGES = dict(
    text_config=dict(GEMMA, vocab_size=300, pad_token_id=0), mm_tokens_per_image=4,
    vision_config=dict(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=28, patch_size=14
    ),
)  # fmt: skip
T5_GEMMA = dict(encoder=GEMMA, decoder=GEMMA, is_encoder_decoder=False)
SWITCH = dict(
    d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=3, num_experts=4, num_sparse_encoder_layers=1,
    expert_capacity=checkpoints.POSITIONS, is_encoder_decoder=False,
)  # fmt: skip
XLM = dict(
    emb_dim=32, n_layers=3, n_heads=4, max_position_embeddings=checkpoints.POSITIONS, layer_norm_eps=1e-5,
    summary_first_dropout=0.0,
)  # fmt: skip
XMOD = dict(ROBERTA, languages=["en_XX", "de_DE"], default_language="de_DE", adapter_reduction_factor=4)
ULTRA = dict(LLAMA, sliding_window=3, prediction_head_size=24)
T5 = dict(
    d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, feed_forward_proj="gated-gelu",
    eos_token_id=SEPARATOR, decoder_start_token_id=0, is_encoder_decoder=True,
)  # fmt: skip


def named(suffix: str, rows: dict[str, Row]) -> dict[str, Row]:
    """The rows of another configuration of the same family."""
    return {f"{name}-{suffix}": row for name, row in rows.items()}


ROWS: dict[str, Row] = {
    **make_rows("Bert", BERT, *EVERY, *PRETRAINED),
    **make_rows("Roberta", ROBERTA, *EVERY),
    **make_rows("XLMRoberta", ROBERTA, *EVERY),
    **make_rows("Camembert", ROBERTA, *EVERY),
    **make_rows("DistilBert", DISTIL, *EVERY),
    **make_rows("Electra", dict(BERT, embedding_size=32), *EVERY, "ForPreTraining"),
    **named("narrow", make_rows("Electra", dict(BERT, embedding_size=24, hidden_act="gelu_new"), *EVERY)),
    **make_rows("Data2VecText", ROBERTA, *EVERY),
    **make_rows("Ernie", dict(BERT, use_task_id=False), *EVERY, *PRETRAINED),
    **make_rows("MegatronBert", BERT, *EVERY, *PRETRAINED),
    **make_rows("RemBert", dict(BERT, input_embedding_size=24, output_embedding_size=40), *EVERY),
    **make_rows("RobertaPreLayerNorm", ROBERTA, *EVERY),
    **make_rows("MPNet", BERT, *EVERY),
    **make_rows("Albert", dict(BERT, embedding_size=24), *EVERY),
    **named("wide", make_rows("Albert", dict(BERT, embedding_size=32, hidden_act="gelu"), TEXT, MASK)),
    **make_rows("DebertaV2", DEBERTA, *EVERY),
    **named("segments", make_rows("DebertaV2", dict(DEBERTA, pooler_hidden_act="gelu", type_vocab_size=2), TEXT)),
    **named("convolution", make_rows("DebertaV2", DEBERTA | CONVOLUTION, *EVERY)),
    **named("groups", make_rows("DebertaV2", DEBERTA | CONVOLUTION | {"conv_groups": 2, "conv_act": "tanh"}, BODY)),
    **named("shallow", make_rows("DebertaV2", DEBERTA | CONVOLUTION | {"num_hidden_layers": 1}, TEXT)),
    **named("linear", make_rows("DebertaV2", DEBERTA | LINEAR, BODY, TEXT)),
    **named("newer", make_rows("DebertaV2", dict(DEBERTA, legacy=False), MASK)),
    **make_rows("Deberta", FIRST, BODY, TEXT, TAG, SPAN, MASK),
    **named("newer", make_rows("Deberta", dict(FIRST, legacy=False), MASK)),
    **make_rows("ModernBert", MODERN, *EVERY),
    **named(
        "mean", make_rows("ModernBert", dict(MODERN, classifier_pooling="mean", classifier_activation="silu"), *EVERY)
    ),
    **named("biased", make_rows("ModernBert", MODERN | MODERN_BIASES | {"decoder_bias": False}, *EVERY)),
    **make_rows("RoFormer", BERT, *EVERY),
    **named("narrow", make_rows("RoFormer", dict(BERT, embedding_size=24), *EVERY)),
    **make_rows("SqueezeBert", dict(BERT, embedding_size=32), *EVERY),
    **named("groups", make_rows("SqueezeBert", dict(BERT, embedding_size=32) | GROUPS, BODY)),
    **make_rows("NomicBert", BERT, BODY, TEXT, TAG, MASK),
    **make_rows("Gte", dict(BERT, type_vocab_size=2), BODY, TEXT, TAG, MASK),
    **named("plain", make_rows("Gte", dict(BERT, type_vocab_size=0), BODY)),
    **make_rows("JinaEmbeddingsV3", dict(BERT, type_vocab_size=2), BODY, TEXT, TAG, SPAN, MASK),
    **make_rows("EuroBert", LLAMA, BODY, TEXT, TAG, MASK),
    **named("bos", make_rows("EuroBert", dict(LLAMA, classifier_pooling="bos"), TEXT)),
    **named("mean", make_rows("EuroBert", dict(LLAMA, classifier_pooling="mean", mlp_bias=True), TEXT, MASK)),
    **make_rows("XLMRobertaXL", ROBERTA, *EVERY),
    **make_rows("Longformer", LONGFORMER, BODY, TEXT, TAG, MASK),
    **{name: replace(row, texts=PAIRS) for name, row in make_rows("Longformer", LONGFORMER, SPAN, CHOICE).items()},
    **make_rows("BigBird", BIG_BIRD, *EVERY),
    **named("full", make_rows("BigBird", dict(BIG_BIRD, attention_type="original_full", use_bias=False), TEXT)),
    **make_rows("OpenAIGPT", GPT2, BODY, TEXT),
    **named("relu", make_rows("OpenAIGPT", dict(GPT2, afn="relu"), TEXT)),
    **make_rows("GPT2", GPT2, BODY, TEXT, TAG, SPAN),
    **{
        name: row
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for name, row in make_rows(family, LLAMA, BODY, TEXT, TAG, SPAN).items()
    },
    **named("both directions", make_rows("Qwen2", dict(LLAMA, is_causal=False), BODY, TAG)),
    **make_rows("Gemma3Text", GEMMA, BODY, TEXT),
    **make_rows("Gemma3", IMAGES, TEXT),
    **named("bidirectional", make_rows("Gemma3Text", GEMMA | dict(use_bidirectional_attention=True), BODY)),
    **make_rows("T5", T5, "EncoderModel", TEXT, TAG, SPAN),
    **make_rows("MT5", T5, "EncoderModel", TEXT, TAG, SPAN),
    **make_rows("UMT5", T5, "EncoderModel", TEXT, TAG, SPAN),
    **make_rows("T5Gemma", T5_GEMMA, "EncoderModel"),
    **make_rows("SwitchTransformers", SWITCH, "EncoderModel"),
    **make_rows("Bart", BART, TEXT, SPAN),
    **make_rows("MBart", BART, TEXT, SPAN),
    **make_rows("PLBart", BART, TEXT),
    **named("other start", make_rows("MBart", dict(BART, decoder_start_token_id=7), TEXT)),
    **named("other start", make_rows("PLBart", dict(BART, decoder_start_token_id=7), TEXT)),
    **make_rows("Mvp", BART, TEXT, SPAN),
    **make_rows("LED", LONG_BART, SPAN),
    **make_rows("BigBirdPegasus", BART | BLOCKS, TEXT, SPAN),
    **make_rows("XLM", XLM, BODY, TEXT, TAG, "ForQuestionAnsweringSimple", "WithLMHeadModel"),
    **named("mean", make_rows("XLM", dict(XLM, summary_type="mean", gelu_activation=False), TEXT)),
    **make_rows("Flaubert", XLM, BODY, "WithLMHeadModel"),
    **make_rows("Xmod", XMOD, *EVERY),
    **named("pre", make_rows("Xmod", dict(XMOD, pre_norm=True, ln_before_adapter=False), BODY)),
    **make_rows("Ultrabert", ULTRA, BODY, TEXT, TAG, SPAN, MASK),
    **named("mean", make_rows("Ultrabert", dict(ULTRA, classifier_pooling="mean"), TEXT)),
}


# Further heads of a network whose table of heads is made by the same function as another's: `make families` runs them.
AGAIN = {
    *(f"{family}{head}" for family in ("XLMRoberta", "Camembert") for head in (BODY, TAG, SPAN, CHOICE)),
    *(
        f"{family}{head}{suffix}"
        for family, suffix in (
            *(("Data2VecText", ""), ("Ernie", ""), ("MegatronBert", ""), ("RobertaPreLayerNorm", "")),
            *(("Electra", "-narrow"), ("RoFormer", "-narrow"), ("ModernBert", "-biased")),
        )
        for head in (TAG, SPAN, CHOICE)
    ),
    *(f"ModernBert{head}-mean" for head in (BODY, TAG, SPAN)),
    *(f"{family}{head}" for family in ("MT5", "UMT5", "Mistral", "Qwen2", "Qwen3") for head in (TAG, SPAN)),
}
PARAMETERS = [pytest.param(name, marks=[pytest.mark.thorough] if name in AGAIN else []) for name in ROWS]


@dataclass(frozen=True)
class Case:
    loaded: Checkpoint
    expected: Tensor  # of the reference
    row: Row


@pytest.fixture(scope="module", params=PARAMETERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint that transformers saved, and the output of the network that it was saved from."""
    row, folder = ROWS[request.param], tmp_path_factory.mktemp("folder")
    theirs = save_reference(row, folder).eval()
    theirs.set_attn_implementation("eager")
    loaded = load(str(folder))
    return Case(loaded, reference_output(loaded, theirs, row.texts), row)


def test_it_equals_transformers(case: Case) -> None:
    loaded, expected, row = case.loaded, case.expected, case.row
    found = head_output(loaded, TorchExecutor(loaded.network), row.texts)
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))  # rounding of float32 grows with the numbers
    assert float((found - expected).abs().max()) < CLOSE * scale
    assert float((expected - expected[:1]).abs().max()) > 100 * CLOSE, "the texts have different outputs"
    if loaded.task in LABEL_TASKS and not any(head in row.kind.__name__ for head in TWO_SCORES):
        assert loaded.labels == tuple(LABELS.values())


@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
def test_the_compiled_step_equals_transformers_or_refuses(case: Case) -> None:
    loaded = case.loaded
    if refusal := unsupported_reason(loaded.config):
        with pytest.raises(UnsupportedError, match=refusal):
            NativeExecutor(loaded.network, precision="float32")
        return
    found = head_output(loaded, NativeExecutor(loaded.network, precision="float32"), case.row.texts)
    assert float((found - case.expected).abs().max()) < CLOSE


@torch.inference_mode()
def test_the_question_is_that_of_big_bird(tmp_path: Path) -> None:
    """transformers reads the kinds of tokens from the first separator, and takes the question out of the answer."""
    row = ROWS["BigBirdForQuestionAnswering"]
    theirs = save_reference(row, tmp_path, sep_token_id=SEPARATOR).eval()
    loaded = load(str(tmp_path))
    pairs = [("dull", "far too long"), (TEXTS[0], TEXTS[1])]
    encodings = loaded.tokenizer.encode_batch(pairs)
    expected = torch.cat([read_reference("span", theirs(torch.tensor([each.ids]))) for each in encodings])
    found = head_output(loaded, TorchExecutor(loaded.network), pairs)
    asked, read = (torch.tensor([text == n for each in encodings for text in each.texts]) for n in (0, 1))
    assert float((found - expected)[read].abs().max()) < CLOSE
    assert float(expected[asked].max()) < -1000


@pytest.mark.parametrize("one_side", [1, 3])
def test_a_window_of_modernbert_is_read_from_either_field(one_side: int, tmp_path: Path) -> None:
    """`sliding_window` comes before `local_attention`, twice as much."""
    row = ROWS["ModernBertForMaskedLM"]
    save_checkpoint(row, tmp_path / "a")
    folder = edited(tmp_path / "a", tmp_path / "b", sliding_window=one_side)
    loaded = load(str(folder))
    theirs = row.kind.from_pretrained(folder).eval()
    assert theirs.config.local_attention == 2 * one_side
    expected = reference_output(loaded, theirs, row.texts)
    assert float((head_output(loaded, TorchExecutor(loaded.network), row.texts) - expected).abs().max()) < CLOSE


def test_a_size_that_is_null_is_refused_by_name(tmp_path: Path) -> None:
    [row] = make_rows("DistilBert", DISTIL, TEXT).values()
    file = save_checkpoint(row, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": None}))
    with pytest.raises(CheckpointError, match=r"config.json: max_positions is None, which should be a whole number"):
        describe_source(str(tmp_path))


@pytest.mark.parametrize(("family", "fields"), [("Bart", BART), ("T5", T5)])
def test_a_start_token_of_a_decoder_that_is_read_is_compared_with_the_vocabulary(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    [row] = make_rows(family, fields, TEXT).values()
    folder = edited(save_checkpoint(row, tmp_path), tmp_path, decoder_start_token_id=10**6)
    with pytest.raises(CheckpointError, match=r"config.json: decoder_start_token_id names tokens \[1000000\]"):
        describe_source(str(folder))


@pytest.mark.parametrize(
    ("family", "head", "fields", "words"),
    [
        ("Qwen2", "ForCausalLM", {"is_causal": False}, "its tokens see those after them"),
        ("Mistral", "Model", {"is_causal": False, "sliding_window": 8}, "is_causal is false, which is known only"),
        ("Bert", "Model", {"is_causal": True}, "is_causal is True, and in this network tokens see those after them"),
        ("ModernBert", "Model", {"is_causal": True}, "is_causal is True, and in this network"),
        ("Qwen2", "Model", {"is_causal": "no"}, "is_causal is 'no', which should be true or false"),
    ],
)
def test_a_decoder_in_both_directions_is_refused_where_it_is_not_known(
    family: str, head: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    [row] = make_rows(family, LLAMA, head).values()
    folder = save_checkpoint(row, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=words):
        describe_source(str(folder))
