"""Recurrent encoder-decoders, from the fixed context of 2014 to attention with a local reach.

Knows no files; `models.checkpoint` does.
"""

from .recurrent_config import RecurrentConfig
from .recurrent_network import RecurrentTranslator, fit_hidden_width

__all__ = ["RecurrentConfig", "RecurrentTranslator", "fit_hidden_width"]
