"""X-MOD: XLM-R with a narrow MLP for each language in every layer (Pfeiffer et al. 2022, arXiv:2205.06266). The
language is that of the configuration, `default_language`; the modules of the others are not read."""

import re
from dataclasses import replace
from logging import getLogger
from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, Json, check_required_values, read_sizes

MODULES = r"\.output\.adapter_modules\."
log = getLogger(__name__)


def model_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"adapter_layer_norm": False, "adapter_reuse_layer_norm": True})
    width, share = read_sizes({"adapter_reduction_factor": 2, **hf}, "hidden_size", "adapter_reduction_factor")
    if width < share:
        raise UnsupportedError(f"adapter_reduction_factor is {share}, which should be {width} at most, the hidden_size")
    return replace(
        bert.roberta_config(hf),
        norm_order="pre" if hf.get("pre_norm") else "post",
        bottleneck=width // share,
        bottleneck_adds_to_norm=bool(hf.get("ln_before_adapter", True)),
    )


def choose_language(family: Family, hf: Json) -> Family:
    """The family with the modules of one language. UnsupportedError if the configuration names none of its own."""
    languages: Any = hf.get("languages") or ["en_XX"]
    language: Any = hf.get("default_language")
    if not isinstance(languages, list) or not isinstance(language, str) or language not in languages:
        raise UnsupportedError(
            f"default_language is {show_value(language)}, which should be one of languages, {show_value(languages)}: "
            "texts are read in this language"
        )
    log.info("model_type %s: texts are read as %s; modules of other languages are not read", family.name, language)
    ours = re.escape(language)
    return replace(
        family,
        renames=(
            (rf"{MODULES}{ours}\.dense1\.", ".bottleneck.up."),
            (rf"{MODULES}{ours}\.dense2\.", ".bottleneck.down."),
            (r"^encoder\.LayerNorm\.", "final_norm."),
            *family.renames,
        ),
        drop=rf"{family.drop}|{MODULES}(?!{ours}\.dense)",
    )


XMOD = Family(
    name="xmod",
    prefix="roberta",
    config=model_config,
    renames=bert.RENAMES,
    heads=bert.roberta_heads("Xmod"),
    drop=bert.DROP,
    variant=choose_language,
)
