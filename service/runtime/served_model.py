"""The `Model` of a loaded checkpoint or of an adapter: the plain values that are known of a served model."""

import logging
import time
from collections.abc import Mapping
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


def build_model(need: MemoryNeed, loaded: Checkpoint, placement: Placement, sampling: Mapping[str, float]) -> Model:
    """Describe a loaded checkpoint as a served model, with the options `sampling`. Its longest text is limited by its
    cache."""
    model = Model(
        name=need.name,
        task="generate" if loaded.decoding else cast(Task, loaded.task),
        family=loaded.family,
        labels=loaded.labels,
        max_tokens=loaded.max_tokens,
        vocab_size=loaded.decoder_config.vocab_size,
        width=loaded.width,
        dtype=placement.precision,
        executor=executor_name(placement, loaded.decoder_config),
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
        excludes_prompt=loaded.excludes_prompt,
        pair_prompt=loaded.pair_prompt,
        late=loaded.late,
        label_prompt=loaded.label_prompt,
        decision_prompt=loaded.decision_prompt,
        sampling=sampling,
        more_forms=loaded.more_forms,
        missing_forms=loaded.missing_forms,
        has_queries=loaded.has_queries,
        query_tokens=loaded.query_tokens,
        skipped_tokens=loaded.skipped_tokens,
        is_static=loaded.config.static,
    )
    if not need.blocks or need.cache_tokens >= model.max_tokens:
        return model
    log.warning("%s: its context is %d tokens, its cache holds %d", model.name, model.max_tokens, need.cache_tokens)
    return replace(model, max_tokens=need.cache_tokens)


def read_generation_defaults(network: Seq2Seq, decoding: DecodingConfig) -> GenerationDefaults:
    """Return the generation defaults of an encoder-decoder, as its checkpoint has them."""
    prefix_length = len(decoding.forced_first)
    sampling = Sampling(
        temperature=decoding.temperature if decoding.sample else 0.0,
        top_k=decoding.top_k if decoding.sample else 0,
        top_p=decoding.top_p if decoding.sample else 1.0,
        banned=tuple((token,) for token in decoding.banned_tokens),
        min_tokens=max(decoding.min_tokens - prefix_length, 0),
        no_repeat_ngram_size=decoding.no_repeat_ngram,
    )
    beams = BeamSearchOptions(
        decoding.beams,
        decoding.length_penalty,
        decoding.early_stopping,
        decoding.never_stop_early,
        prefix_length=prefix_length,
        forced_end_tokens=decoding.forced_last,
        renormalize=decoding.renormalize,
    )
    return GenerationDefaults(
        decoder_prompt=(network.start_token, *decoding.forced_first),
        max_tokens=max(decoding.max_tokens - prefix_length, 1),
        sampling=sampling,
        beams=beams,
    )


def build_adapter_model(base: Model, name: str, source: str, plan: LoraPlan, number: int) -> Model:
    """Describe an adapter as a served model: its own task and labels, the rest from its base model."""
    description = plan.description
    return replace(
        base,
        name=name,
        task=cast(Task, description.head.task),
        labels=description.head.labels,
        max_tokens=base.max_tokens if base.task == "generate" else description.max_tokens,
        source=source,
        created=int(time.time()),
        prompts=description.head.prompts,
        pooling=description.head.pooling,
        both_orders=description.head.both_orders,
        width=description.vector_width,
        excludes_prompt=description.head.excludes_prompt,
        pair_prompt=description.head.pair_prompt,
        late=description.late,
        more_forms=description.head.more_forms,
        missing_forms=description.head.missing_forms,
        has_queries=description.head.has_queries,
        adapter=number,
    )
