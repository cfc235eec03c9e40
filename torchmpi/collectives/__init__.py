"""The public collectives and messages, and their dispatch to a backend."""

from .movements import *
from .objects import *
from .point_to_point import *
from .reductions import *
from .tensor_lists import *
