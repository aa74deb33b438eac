"""Recurrent encoder-decoders, from the fixed context of 2014 to attention with a local reach.

Knows no files; `models.checkpoint` does.
"""

from models.recurrent.config import RecurrentConfig
from models.recurrent.network import RecurrentTranslator, sized

__all__ = ["RecurrentConfig", "RecurrentTranslator", "sized"]
