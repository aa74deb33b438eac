"""Scores of generated translations: BLEU (Papineni et al. 2002) and chrF (Popović 2015), computed by sacrebleu.

Decoding is greedy.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.seq2seq.decoding import DecodingConfig, generate

from ..data.examples import Example
from .objective import Objective
from .translation import TranslationObjective

HAS_SACREBLEU = find_spec("sacrebleu") is not None
if HAS_SACREBLEU:
    import sacrebleu


def score_translations(objective: Objective[Any], examples: Sequence[Example[Any]], tokens: int) -> dict[str, float]:
    """Score translations of examples whose source fits, about `tokens` at a time.  Empty without any or sacrebleu."""
    if not (HAS_SACREBLEU and isinstance(objective, TranslationObjective)):
        return {}
    sources = objective.encode([example.text for example in examples])
    fitting = [(source, each) for source, each in zip(sources, examples, strict=True) if len(source) <= objective.limit]
    fitting.sort(key=lambda pair: len(pair[0]))
    translations: list[str] = []
    count = max(1, tokens // objective.limit)
    for at in range(0, len(fitting), count):
        translations += translate(objective, [source for source, _ in fitting[at : at + count]])
    references = [example.label for _, example in fitting]
    bleu, chrf = sacrebleu.corpus_bleu(translations, [references]), sacrebleu.corpus_chrf(translations, [references])
    return {"BLEU": bleu.score, "chrF": chrf.score}


def translate(objective: TranslationObjective, sources: Sequence[list[int]]) -> list[str]:
    end = objective.tokenizer.eos_id
    assert end is not None
    options = DecodingConfig(stop_tokens=frozenset({end}), max_tokens=objective.limit)
    answers = generate(objective.network, RaggedBatch.of(sources, device=objective.device), options)
    return [objective.tokenizer.decode(answer.tokens) for answer in answers]
