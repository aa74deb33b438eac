"""The side that speaks: what the routes take for a registry and an engine, and are many replicas.

Knows no HTTP, no tensor, and not who starts replicas.  The one idea: a stream here is the same Stream that an engine
gives out, with a line to a replica where the engine's thread would be; so deadlines, slow readers and counting are one
code, and a replica that is lost is one error in the streams that it had begun to answer.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from service.change import Change
from service.engine.blocks import Key, chain
from service.engine.engine import Counts
from service.engine.stream import Link, Stream
from service.engine.worker import Ended
from service.errors import Conflict, NotFound, PolyheadError, Stopped, Unavailable
from service.fleet.frames import Begun
from service.fleet.line import Address, Line, Shelf
from service.fleet.routing import Affine, Answers, Ask, Policy
from service.model import Known, Model, State, concerning
from service.offer import Offer
from service.process import Books
from service.request import Duty, Event, Explain, Failed, Generate, Request, Task, Token

log = logging.getLogger("polyhead.fleet")
