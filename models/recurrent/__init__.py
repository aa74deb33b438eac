"""Recurrent encoder-decoders: with a fixed context (2014), with attention, and with local attention."""

from .recurrent_config import RecurrentConfig
from .recurrent_network import RecurrentTranslator, fit_hidden_width

__all__ = ["RecurrentConfig", "RecurrentTranslator", "fit_hidden_width"]
