"""From a checkpoint, or an adapter beside one, to the plain values that are known of a served model."""

import logging
import time
from dataclasses import replace
from typing import cast

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.unmerged_adapter import Laid
from polyhead.models.seq2seq.decoding import Writing
from polyhead.models.seq2seq.protocol import Seq2Seq

from ..core.model import Customs, Model
from ..core.request import Beams, Sampling, Task
from .executor_choice import called
from .memory_budget import Need
from .placement import Place

log = logging.getLogger("polyhead.loader")


def model_of(need: Need, loaded: Checkpoint, place: Place) -> Model:
    """What is served: no longer texts than the cache holds."""
    model = Model(
        name=need.name,
        task="generate" if loaded.writing else cast(Task, loaded.task),
        family=loaded.family,
        labels=loaded.labels,
        max_tokens=loaded.max_tokens,
        vocab_size=loaded.body.vocab_size,
        width=loaded.body.width,
        dtype=place.precision,
        executor=called(place, loaded.body),
        source=loaded.source,
        created=int(time.time()),
        tokenizer=loaded.tokenizer,
        chat=loaded.chat,
        stop_tokens=loaded.writing.stops if loaded.writing else loaded.stop_tokens,
        customs=customs_of(cast(Seq2Seq, loaded.head), loaded.writing) if loaded.writing else None,
        prompts=loaded.prompts,
        pooling=loaded.pooling,
        both_orders=loaded.both_orders,
    )
    if not need.blocks or need.cache_tokens >= model.max_tokens:
        return model
    log.warning("%s: its context is %d tokens, its cache holds %d", model.name, model.max_tokens, need.cache_tokens)
    return replace(model, max_tokens=need.cache_tokens)


def customs_of(network: Seq2Seq, how: Writing) -> Customs:
    """As the checkpoint has it."""
    given = len(how.opening)
    sampling = Sampling(
        temperature=how.temperature if how.drawn else 0.0,
        top_k=how.top_k if how.drawn else 0,
        top_p=how.top_p if how.drawn else 1.0,
        banned=tuple((token,) for token in how.banned),
        min_tokens=max(how.least - given, 0),
        once=how.once,
    )
    rule = Beams(
        how.beams, how.length_penalty, how.early, how.patient, given=given, closing=how.closing, odds=how.renormalised
    )
    return Customs(
        opening=(network.start, *how.opening),
        most=max(how.most - given, 1),
        sampling=sampling,
        beams=rule,
    )


def adapted(trunk: Model, name: str, source: str, laid: Laid, number: int) -> Model:
    """What is served of an adapter: its task and labels, the rest is its trunk's."""
    what = laid.what
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
