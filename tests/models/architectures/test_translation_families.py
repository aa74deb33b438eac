"""Encoder-decoders from saved folders: logits, greedy answers and beams equal the reference; the rest is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.seq2seq.decoding import DecodingConfig, GeneratedSequence, generate, search_beams
from polyhead.service.config.settings import Settings
from polyhead.service.runtime.executor_choice import make_deterministic
from polyhead.service.runtime.memory_budget import measure_model
from polyhead.service.runtime.placement import choose_placement
from tests.support.edits import edited, with_tensors
from tests.support.translators import KINDS, translator

PAD, END = 1, 2
SOURCES = [[5, 6, 7, 8, 9, 10, END], [11, 12, END], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, END], [30, END]]
TARGETS = [[PAD, 7, 8, 9], [PAD, 20, 21, 22, 23, 24, 25, 26, 27], [PAD], [PAD, 4]]
MAX_TOKENS = 10
CheckpointOf = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    """Makes the reference model of a kind and the folder that it is saved to, once for each kind."""
    models: dict[str, tuple[Any, Path]] = {}

    def make(kind: str) -> tuple[Any, Path]:
        if kind not in models:
            folder = tmp_path_factory.mktemp("translators") / kind
            models[kind] = translator(folder, kind), folder
        return models[kind]

    return make


def reference_answers(theirs: Any, **options: object) -> list[list[int]]:
    """The output tokens of the reference, without start token and padding."""
    longest = max(map(len, SOURCES))
    padded = torch.tensor([source + [PAD] * (longest - len(source)) for source in SOURCES])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in SOURCES])
    # The reference's cache supports only equal depths of encoder and decoder.
    options = {"use_cache": False, "do_sample": False, "max_new_tokens": MAX_TOKENS, **options}
    return [until_end(answer[1:]) for answer in theirs.generate(padded, attention_mask=mask, **options).tolist()]


def until_end(answer: list[int]) -> list[int]:
    return answer[: answer.index(END) + 1] if END in answer else answer


def with_stop_token(answers: list[GeneratedSequence]) -> list[list[int]]:
    return [[*answer.tokens, *([answer.stop_token] if answer.stop_token >= 0 else [])] for answer in answers]


def generate_with(loaded: Checkpoint, **options: Any) -> list[list[int]]:
    assert loaded.decoding is not None
    config = replace(loaded.decoding, **{"max_tokens": MAX_TOKENS, **options})
    return with_stop_token(generate(loaded.head, RaggedBatch.of(SOURCES), config))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_reference(checkpoint_of: CheckpointOf, kind: str) -> None:
    theirs, folder = checkpoint_of(kind)
    loaded = load(str(folder))
    assert (loaded.task, loaded.family) == ("translate", theirs.config.model_type)
    ours = loaded.head(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS))
    pairs = zip(SOURCES, TARGETS, strict=True)
    expected = torch.cat([theirs(torch.tensor([s]), decoder_input_ids=torch.tensor([t])).logits[0] for s, t in pairs])
    assert float((ours - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert float(expected.std()) > 0.5, "the logits of the reference differ"


@pytest.mark.parametrize("kind", ["t5", "t5-1.1", "bart", "marian"])
def test_greedy_answers_and_beams_are_those_of_the_reference(checkpoint_of: CheckpointOf, kind: str) -> None:
    theirs, folder = checkpoint_of(kind)
    loaded = load(str(folder))
    greedy = generate_with(loaded, no_repeat_ngram=2)
    assert greedy == reference_answers(theirs, no_repeat_ngram_size=2)
    beams = generate_with(loaded, beams=4, no_repeat_ngram=2)
    assert beams == reference_answers(theirs, num_beams=4, no_repeat_ngram_size=2)
    assert beams != greedy
    assert len({token for answer in (*greedy, *beams) for token in answer}) > 12


OPTIONS: dict[str, tuple[dict[str, Any], DecodingConfig]] = {
    "summaries": (
        dict(forced_bos_token_id=0, forced_eos_token_id=2, length_penalty=2.0, max_length=11, min_length=7,
             no_repeat_ngram_size=3, num_beams=4, early_stopping=True),
        DecodingConfig(stop_tokens=frozenset((2,)), max_tokens=10, min_tokens=6, forced_first=(0,), forced_last=(2,),
                       no_repeat_ngram=3, beams=4,
                length_penalty=2.0, early_stopping=True, top_k=50),
    ),
    "translations": (
        dict(bad_words_ids=[[PAD]], forced_eos_token_id=2, max_length=9, num_beams=3, renormalize_logits=True,
             forced_bos_token_id=None, early_stopping="never", suppress_tokens=[7, 8]),
        DecodingConfig(stop_tokens=frozenset((2,)), max_tokens=8, forced_last=(2,), banned_tokens=(PAD, 7, 8),
                       renormalize=True, beams=3,
                never_stop_early=True, top_k=50),
    ),
    "several ends": (
        dict(eos_token_id=[2, 155, 168, 196], max_new_tokens=12, num_beams=4, length_penalty=0.5, min_new_tokens=2,
             forced_bos_token_id=None, forced_eos_token_id=None),
        DecodingConfig(stop_tokens=frozenset((2, 155, 168, 196)), max_tokens=12, min_tokens=2, beams=4,
                       length_penalty=0.5, top_k=50),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), [("bart", "summaries"), ("marian", "translations"), ("bart", "several ends")]
)
def test_the_generation_config_of_a_folder_is_applied(
    checkpoint_of: CheckpointOf, tmp_path: Path, kind: str, options: str
) -> None:
    theirs, folder = checkpoint_of(kind)
    fields, expected = OPTIONS[options]
    file = "generation_config.json"
    before = json.loads((folder / file).read_text("utf-8"))
    after = {key: value for key, value in {**before, **fields}.items() if value is not None}
    folder = edited(folder, tmp_path / "result", file=file, **fields)
    loaded = load(str(folder))
    assert loaded.decoding == expected
    theirs.generation_config = type(theirs.generation_config)(**after)
    try:
        limit = {"max_new_tokens": None} if "max_length" in fields else {"max_new_tokens": fields["max_new_tokens"]}
        reference = reference_answers(theirs, **limit)
    finally:
        theirs.generation_config = type(theirs.generation_config)(**before)
    ends = fields.get("eos_token_id", [END])
    cut = [next((a[: n + 1] for n, token in enumerate(a) if token in ends), a) for a in reference]
    assert generate_with(loaded, max_tokens=expected.max_tokens) == cut


def test_beam_search_returns_answers_in_the_order_of_the_reference(checkpoint_of: CheckpointOf) -> None:
    theirs, folder = checkpoint_of("t5-1.1")
    loaded = load(str(folder))
    assert loaded.decoding is not None
    found = search_beams(loaded.head, RaggedBatch.of(SOURCES), replace(loaded.decoding, max_tokens=MAX_TOKENS, beams=3))  # type: ignore[arg-type]
    expected = reference_answers(theirs, num_beams=3, num_return_sequences=3)
    assert [answer for answers in found for answer in with_stop_token(answers)] == expected


def test_without_a_generation_config_the_model_config_is_used(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    _, folder = checkpoint_of("marian")
    old = edited(folder, tmp_path / "old", num_beams=6, max_length=33, bad_words_ids=[[PAD]])
    (old / "generation_config.json").unlink()
    config = describe_source(str(old)).head.decoding
    assert config is not None
    assert (config.beams, config.max_tokens, config.banned_tokens, config.forced_last, config.stop_tokens) == (
        6,
        32,
        (PAD,),
        (END,),
        frozenset((END,)),
    )


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("t5", {"feed_forward_proj": "mixed-relu"}, "feed_forward_proj 'mixed-relu' is neither plain nor gated"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "activation 'mish'"),
        ("t5", {"relative_attention_num_buckets": 2}, "distances is 2, which should be 4 at least"),
        ("t5", {"num_decoder_layers": 10**9}, "1000000000 layers, but the files hold"),
        ("t5", {"num_decoder_layers": 4}, r"tensors are missing: .*decoder\.block\.3\."),
        ("t5", {"architectures": ["T5Model"]}, "T5Model.*T5ForConditionalGeneration"),
        ("bart", {"normalize_before": True}, "normalize_before is True: only False"),
        ("bart", {"decoder_layers": 2}, r"no place in the network.*decoder\.layers\.2\."),
        ("bart", {"encoder_attention_heads": 0}, "wrong kind"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings is False"),
        ("marian", {"decoder_vocab_size": 100}, "one vocabulary for both sides"),
        ("marian", {"max_position_embeddings": 2**30}, "max_positions is 1073741824, which should be .* at most"),
    ],
)
def test_unsupported_configurations_are_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path, kind: str, changes: dict[str, Any], sentence: str
) -> None:
    folder = edited(checkpoint_of(kind)[1], tmp_path / "broken", **changes)
    with pytest.raises(CheckpointError, match=f"(?s){sentence}") as raised:
        load(str(folder))
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repetition_penalty": 1.3}, "repetition_penalty 1.3 would change the output"),
        ({"encoder_no_repeat_ngram_size": 4}, "encoder_no_repeat_ngram_size 4"),
        ({"num_request_beams": 2}, "num_request_beams 2"),
        ({"do_sample": True, "num_beams": 4}, "do_sample with num_beams"),
        ({"bad_words_ids": [[5, 6]]}, "bad_words_ids of several tokens"),
        ({"early_stopping": "soon"}, "early_stopping 'soon' is not true, false or never"),
        ({"forced_bos_token_id": "0"}, "'0' is no token id"),
        (
            {"decoder_start_token_id": 999},
            r"decoder_start_token_id names tokens \[999\]; the network has the tokens 0 to 383",
        ),
        ({"num_beams": [4]}, "wrong kind"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "decoder_start_token_id is missing"),
    ],
)
def test_unsupported_generation_configs_are_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    file = "generation_config.json"
    folder = edited(checkpoint_of("t5")[1], tmp_path / "broken", file=file, **changes)
    if "decoder_start_token_id" in changes:
        folder = edited(folder, tmp_path / "bare", decoder_start_token_id=None, bos_token_id=None)
    with pytest.raises(CheckpointError, match=f"(?s){sentence}"):
        describe_source(str(folder))


def test_separate_decoder_embeddings_are_refused_unless_equal(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    _, folder = checkpoint_of("marian")
    name = "model.decoder.embed_tokens.weight"

    def with_decoder(target: str, more: float) -> str:
        change = lambda tensors: tensors.update({name: tensors["model.shared.weight"] + more})  # noqa: E731
        return str(with_tensors(folder, tmp_path / target, change))

    load(with_decoder("same", 0.0))
    other = with_decoder("other", 1.0)
    with pytest.raises(UnsupportedError, match="embeddings of their own; only one vocabulary for both") as raised:
        load(other)
    assert name in str(raised.value)


def test_an_encoder_alone_is_an_embedder(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """As sentence-transformers saves encoders of this kind."""
    theirs, folder = checkpoint_of("t5")
    encoder = load(str(edited(folder, tmp_path / "alone", architectures=["T5EncoderModel"])))
    assert encoder.task == "embed"
    with torch.no_grad():
        expected = theirs.encoder(torch.tensor(SOURCES[:1])).last_hidden_state[0]
        assert torch.allclose(encoder.network(RaggedBatch.of(SOURCES[:1])), expected, atol=1e-5)


def test_deterministic_mode_refuses_encoder_decoders(checkpoint_of: CheckpointOf) -> None:
    source = str(checkpoint_of("t5")[1])
    model = measure_model("model", describe_source(source))
    assert (model.task, model.config.causal) == ("generate", True)
    with pytest.raises(UnsupportedError, match="deterministic: networks that read one text and write another"):
        make_deterministic(load(source), Settings(deterministic=True), choose_placement(Settings(deterministic=True)))
