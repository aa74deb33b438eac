"""Encoder-decoder families equal their reference: logits, greedy answers and beams, from saved folders."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.seq2seq.decoding import GeneratedSequence, generate
from tests.support.checkpoints import roberta_bpe
from tests.support.edits import edited

WORDS, PAD, END, LANGUAGE, SOURCE_LANGUAGE = 384, 1, 2, 300, 301
ANSWER, TIE = 40, 1e-4
SOURCES = [[5, 6, 7, 8, 9, 10, END], [11, 12, END], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, END], [30, END]]
TARGETS = [[END, 7, 8, 9], [END, 20, 21, 22, 23, 24, 25, 26, 27], [END], [END, 4]]
SIDES = dict(
    vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=40, max_position_embeddings=64, pad_token_id=PAD,
    bos_token_id=0, eos_token_id=END, decoder_start_token_id=END, forced_eos_token_id=None,
)  # fmt: skip
SWITCH = dict(
    vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=3, num_decoder_layers=2, num_experts=4,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, pad_token_id=PAD, eos_token_id=END,
    decoder_start_token_id=END,
)  # fmt: skip
GEMMA = dict(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=64, query_pre_attn_scalar=12, sliding_window=3,
    attn_logit_softcapping=2.0, final_logit_softcapping=3.0, pad_token_id=PAD, bos_token_id=0, eos_token_id=END,
)  # fmt: skip
PROPHET = dict(
    vocab_size=WORDS, hidden_size=32, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
    num_decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=40, max_position_embeddings=64, num_buckets=8,
    relative_max_distance=12, pad_token_id=0, bos_token_id=END, eos_token_id=END, decoder_start_token_id=END,
)  # fmt: skip
LED = dict(SIDES, max_encoder_position_embeddings=64, max_decoder_position_embeddings=48)


@dataclass(frozen=True)
class Row:
    """A network: configuration and class of the reference, and how it generates by default."""

    config: Callable[..., Any]
    kind: Any
    fields: dict[str, Any]
    generation: dict[str, Any]


def gemma_sides(*, tie_word_embeddings: bool = True, **decoder: Any) -> Any:
    """T5Gemma; `decoder` are fields of the decoder only."""
    return tf.T5GemmaConfig(
        encoder=GEMMA, decoder={**GEMMA, **decoder}, tie_word_embeddings=tie_word_embeddings, vocab_size=WORDS
    )


ROWS: dict[str, Row] = {
    "m2m_100": Row(
        tf.M2M100Config, tf.M2M100ForConditionalGeneration, SIDES, dict(forced_bos_token_id=LANGUAGE, num_beams=1)
    ),
    "nllb": Row(
        tf.M2M100Config,
        tf.M2M100ForConditionalGeneration,
        dict(SIDES, scale_embedding=False, activation_function="gelu", decoder_layers=3),
        dict(forced_bos_token_id=LANGUAGE),
    ),
    "mbart": Row(
        tf.MBartConfig,
        tf.MBartForConditionalGeneration,
        dict(SIDES, scale_embedding=True),
        dict(decoder_start_token_id=LANGUAGE),
    ),
    "mbart50": Row(
        tf.MBartConfig,
        tf.MBartForConditionalGeneration,
        dict(SIDES, activation_function="relu"),
        dict(forced_bos_token_id=LANGUAGE),
    ),
    "plbart": Row(tf.PLBartConfig, tf.PLBartForConditionalGeneration, SIDES, dict(decoder_start_token_id=LANGUAGE)),
    "blenderbot": Row(
        tf.BlenderbotConfig, tf.BlenderbotForConditionalGeneration, SIDES, dict(encoder_no_repeat_ngram_size=0)
    ),
    "blenderbot-small": Row(
        tf.BlenderbotSmallConfig, tf.BlenderbotSmallForConditionalGeneration, dict(SIDES, scale_embedding=True), {}
    ),
    "led": Row(tf.LEDConfig, tf.LEDForConditionalGeneration, dict(LED, attention_window=4), {}),
    "mvp": Row(tf.MvpConfig, tf.MvpForConditionalGeneration, SIDES, {}),
    "bigbird_pegasus": Row(
        tf.BigBirdPegasusConfig,
        tf.BigBirdPegasusForConditionalGeneration,
        dict(SIDES, block_size=4, num_random_blocks=1),
        {},
    ),
    "switch_transformers": Row(tf.SwitchTransformersConfig, tf.SwitchTransformersForConditionalGeneration, SWITCH, {}),
    "t5gemma": Row(gemma_sides, tf.T5GemmaForConditionalGeneration, {}, dict(decoder_start_token_id=0)),
    "t5gemma-narrow": Row(
        gemma_sides,
        tf.T5GemmaForConditionalGeneration,
        dict(hidden_size=24, final_logit_softcapping=None, tie_word_embeddings=False),
        dict(decoder_start_token_id=0),
    ),
    "prophetnet": Row(tf.ProphetNetConfig, tf.ProphetNetForConditionalGeneration, PROPHET, {}),
    "prophetnet-streams": Row(
        tf.ProphetNetConfig,
        tf.ProphetNetForConditionalGeneration,
        dict(PROPHET, ngram=3, num_buckets=7, relative_max_distance=27, activation_function="relu"),
        {},
    ),
    "led-wide": Row(tf.LEDConfig, tf.LEDForConditionalGeneration, dict(LED, attention_window=[32, 32]), {}),
}
# Of these the reference gives rows the distance biases of other rows in a step of several tokens.
STEPWISE = (tf.ProphetNetForConditionalGeneration,)
CaseOf = Callable[[str], tuple[Any, Checkpoint, Path]]


@torch.no_grad()
def save_reference(row: Row, folder: Path) -> Any:
    """The reference with random weights, norms around 1, saved with a tokenizer."""
    torch.manual_seed(0)
    theirs = row.kind(row.config(**row.fields)).eval()
    for name, parameter in theirs.named_parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)
    for name, buffer in theirs.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_(std=0.2)
    for key, value in row.generation.items():
        setattr(theirs.generation_config, key, value)
    theirs.save_pretrained(folder)
    roberta_bpe(WORDS).save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """Makes the reference of a row, what is loaded from its folder, and the folder, once."""
    cases: dict[str, tuple[Any, Checkpoint, Path]] = {}

    def make(name: str) -> tuple[Any, Checkpoint, Path]:
        if name not in cases:
            folder = tmp_path_factory.mktemp("sides") / name
            theirs = save_reference(ROWS[name], folder)
            cases[name] = theirs, load(str(folder)), folder
        return cases[name]

    return make


@torch.no_grad()
def reference_logits(theirs: Any, source: list[int], target: list[int]) -> torch.Tensor:
    """[T, V] the logits after each token of the target."""
    if not isinstance(theirs, STEPWISE):
        whole: torch.Tensor = theirs(torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits[0]
        return whole
    read, kept, found = theirs.get_encoder()(torch.tensor([source])), None, []
    for token in target:
        step = theirs(
            encoder_outputs=read, decoder_input_ids=torch.tensor([[token]]), past_key_values=kept, use_cache=True
        )
        kept = step.past_key_values
        found.append(step.logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_logits_equal_the_reference(case_of: CaseOf, name: str) -> None:
    theirs, ours, _ = case_of(name)
    assert (ours.task, ours.family) == ("translate", theirs.config.model_type)
    found = ours.head(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS))
    expected = torch.cat([reference_logits(theirs, s, t) for s, t in zip(SOURCES, TARGETS, strict=True)])
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert float(expected.std()) > 0.1, "the logits of the reference differ"


def until_end(answer: list[int]) -> list[int]:
    return answer[: answer.index(END) + 1] if END in answer else answer


def with_stop_token(answer: GeneratedSequence) -> list[int]:
    return [*answer.tokens, *([answer.stop_token] if answer.stop_token >= 0 else [])]


@torch.no_grad()
def assert_same_or_tied(theirs: Any, source: list[int], ours: list[int], expected: list[int]) -> None:
    """The first different token is as likely as the reference's, up to rounding."""
    place = next((n for n, pair in enumerate(zip(ours, expected, strict=False)) if len(set(pair)) > 1), None)
    if place is None:
        assert len(ours) == len(expected)
        return
    start = theirs.generation_config.decoder_start_token_id
    logits = reference_logits(theirs, source, [start, *expected[:place]])[-1]
    assert float(logits[expected[place]] - logits[ours[place]]) < TIE


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROWS)
def test_greedy_answers_equal_those_of_generate(case_of: CaseOf, name: str) -> None:
    theirs, ours, _ = case_of(name)
    choice = torch.Generator().manual_seed(1)
    sources = torch.randint(4, WORDS, (20, 6), generator=choice)
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=ANSWER, no_repeat_ngram_size=3)
    made = theirs.generate(sources, attention_mask=torch.ones_like(sources), **options)
    expected = [until_end(answer[1:]) for answer in made.tolist()]
    assert ours.decoding is not None
    config = replace(ours.decoding, max_tokens=ANSWER, no_repeat_ngram=3)
    found = generate(ours.head, RaggedBatch.of(sources.tolist()), config)  # type: ignore[arg-type]
    for source, answer, their in zip(sources.tolist(), found, expected, strict=True):
        assert_same_or_tied(theirs, source, with_stop_token(answer), their)
    assert len({tuple(answer) for answer in expected}) > 5, "the answers depend on the sources"
    if first := ROWS[name].generation.get("forced_bos_token_id"):
        assert {answer.tokens[0] for answer in found} == {first}


@pytest.mark.parametrize("name", ["prophetnet", "prophetnet-streams"])
def test_beams_equal_those_of_generate(case_of: CaseOf, name: str) -> None:
    """Whose rows of a step are selected and repeated."""
    theirs, ours, _ = case_of(name)
    sources = torch.randint(4, WORDS, (12, 6), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=12, num_beams=4)
    made = theirs.generate(sources, attention_mask=torch.ones_like(sources), **options)
    assert ours.decoding is not None
    config = replace(ours.decoding, max_tokens=12, beams=4)
    found = generate(ours.head, RaggedBatch.of(sources.tolist()), config)  # type: ignore[arg-type]
    assert [with_stop_token(answer) for answer in found] == [until_end(answer[1:]) for answer in made.tolist()]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("led", {"attention_window": [4, 8]}, "attention_window .*only one width for all layers"),
    ("led", {"attention_window": 3}, "attention_window is 3"),
    ("led", {"attention_window": []}, "attention_window is"),
    ("m2m_100", {"max_position_embeddings": 2**30}, "max_positions is 1073741824, which should be .* at most"),
    ("m2m_100", {"pad_token_id": -5}, "position_offset is -4"),
    ("mvp", {"use_prompt": True}, "use_prompt is True: only False is known"),
    ("switch_transformers", {"expert_capacity": "all"}, "expert_capacity is 'all', which should be a whole number"),
    ("bigbird_pegasus", {"attention_type": "other"}, "attention_type 'other' is not one of block_sparse"),
    ("prophetnet", {"pad_token_id": 1}, "pad_token_id is 1: only 0 is known"),
    ("prophetnet", {"add_cross_attention": False}, "add_cross_attention is False: only True is known"),
    ("prophetnet", {"num_buckets": 0}, "distances is 0, which should be 4 at least"),
    ("prophetnet", {"num_buckets": 2}, "distances is 2, which should be 4 at least"),
    ("prophetnet", {"num_buckets": 16}, r"relative_pos_embeddings.* its shape is \[16.*, but .* asks for \[32"),
    ("prophetnet", {"relative_max_distance": 5}, "farthest is 5, which should be more than 5"),
    ("prophetnet", {"ngram": 0}, "ngram is 0, which should be a whole number from 1"),
    ("prophetnet", {"ngram": 3}, r"ngram_embeddings.* its shape is \[0, 32\], but .* asks for \[1, 32\]"),
    ("prophetnet", {"max_position_embeddings": 2}, "max_positions is 0, which should be a whole number from 1"),
    ("mbart", {"decoder_layers": 3}, "tensors are missing"),
    ("mbart", {"activation_function": "mish"}, "activation 'mish'"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_what_is_not_known_is_refused_by_name(
    case_of: CaseOf, tmp_path: Path, name: str, changes: dict[str, Any], sentence: str
) -> None:
    folder = edited(case_of(name)[2], tmp_path / "changed", **changes)
    with pytest.raises(CheckpointError, match=sentence):
        load(str(folder))


def test_rules_that_are_not_followed_are_refused(case_of: CaseOf, tmp_path: Path) -> None:
    """As published folders of BlenderBot have it."""
    folder = edited(
        case_of("blenderbot")[2], tmp_path / "rule", file="generation_config.json", encoder_no_repeat_ngram_size=3
    )
    with pytest.raises(CheckpointError, match="encoder_no_repeat_ngram_size 3 would change the output"):
        load(str(folder))
