"""Algorithms of asynchronous training, and of gossip; each is a class."""

from . import asgd, compensated, downpour, easgd, gossip, mixing, outer_steps, stability, update
from .asgd import *
from .compensated import *
from .downpour import *
from .easgd import *
from .gossip import *
from .mixing import *
from .outer_steps import *
from .stability import *
from .update import *

_MODULES = (asgd, compensated, downpour, easgd, gossip, mixing, outer_steps, stability, update)
"""Modules whose ``__all__`` is public."""
