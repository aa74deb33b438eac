"""The `Model` of a loaded checkpoint or of an adapter: the plain values that are known of a served model."""

import logging
import time
from dataclasses import replace
from typing import cast

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.unmerged_adapter import LoraPlan
from polyhead.models.seq2seq.decoding import DecodingConfig
from polyhead.models.seq2seq.protocol import Seq2Seq

from ..core.model import GenerationDefaults, Model
from ..core.request import BeamSearchOptions, Sampling, Task
from .executor_choice import executor_name
from .memory_budget import MemoryNeed
from .placement import Placement

log = logging.getLogger("polyhead.loader")


def build_model(need: MemoryNeed, loaded: Checkpoint, place: Placement) -> Model:
    """Describe a loaded checkpoint as a served model. Its longest text is limited by its cache."""
    model = Model(
        name=need.name,
        task="generate" if loaded.decoding else cast(Task, loaded.task),
        family=loaded.family,
        labels=loaded.labels,
        max_tokens=loaded.max_tokens,
        vocab_size=loaded.decoder_config.vocab_size,
        width=loaded.decoder_config.width,
        dtype=place.precision,
        executor=executor_name(place, loaded.decoder_config),
        source=loaded.source,
        created=int(time.time()),
        tokenizer=loaded.tokenizer,
        chat=loaded.chat,
        stop_tokens=loaded.decoding.stop_tokens if loaded.decoding else loaded.stop_tokens,
        generation_defaults=read_generation_defaults(cast(Seq2Seq, loaded.head), loaded.decoding)
        if loaded.decoding
        else None,
        prompts=loaded.prompts,
        pooling=loaded.pooling,
        both_orders=loaded.both_orders,
    )
    if not need.blocks or need.cache_tokens >= model.max_tokens:
        return model
    log.warning("%s: its context is %d tokens, its cache holds %d", model.name, model.max_tokens, need.cache_tokens)
    return replace(model, max_tokens=need.cache_tokens)


def read_generation_defaults(network: Seq2Seq, how: DecodingConfig) -> GenerationDefaults:
    """Return the generation defaults of an encoder-decoder, as its checkpoint has them."""
    given = len(how.forced_first)
    sampling = Sampling(
        temperature=how.temperature if how.sample else 0.0,
        top_k=how.top_k if how.sample else 0,
        top_p=how.top_p if how.sample else 1.0,
        banned=tuple((token,) for token in how.banned_tokens),
        min_tokens=max(how.min_tokens - given, 0),
        no_repeat_ngram_size=how.no_repeat_ngram,
    )
    rule = BeamSearchOptions(
        how.beams,
        how.length_penalty,
        how.early_stopping,
        how.never_stop_early,
        prefix_length=given,
        forced_end_tokens=how.forced_last,
        renormalize=how.renormalize,
    )
    return GenerationDefaults(
        decoder_prompt=(network.start_token, *how.forced_first),
        max_tokens=max(how.max_tokens - given, 1),
        sampling=sampling,
        beams=rule,
    )


def build_adapter_model(trunk: Model, name: str, source: str, laid: LoraPlan, number: int) -> Model:
    """Describe an adapter as a served model: its own task and labels, the rest from its base model."""
    what = laid.description
    return replace(
        trunk,
        name=name,
        task=cast(Task, what.head.task),
        labels=what.head.labels,
        max_tokens=trunk.max_tokens if trunk.task == "generate" else what.max_tokens,
        source=source,
        created=int(time.time()),
        prompts=what.head.prompts,
        pooling=what.head.pooling,
        both_orders=what.head.both_orders,
        adapter=number,
    )
