"""Parameter servers: tensors sharded over the ranks, which any rank may update and read without a matching call.

Example:
    import torchmpi.parameterserver as ps

    server = ps.init(weights)                       # collective
    ps.send(server, -0.1 * gradient, "add").wait()  # at any time, by any rank
    weights = ps.receive(server).wait()
"""

from typing import TYPE_CHECKING

from ..nn import diloco, local_sgd  # use no servers, and are public here too, beside the updates that do
from ..nn.diloco import *
from ..nn.local_sgd import *
from ..other_names import missing_attribute as _missing_attribute
from . import parameter_lists, recording, rules, runs, servers, shard_checkpoint, simulation, staleness, updates
from .parameter_lists import *
from .recording import *
from .rules import *
from .runs import *
from .servers import *
from .shard_checkpoint import *
from .simulation import *
from .staleness import *
from .updates import *

if not TYPE_CHECKING:  # type checkers take what is imported with *, and read no computed list
    _MODULES = (diloco, local_sgd, parameter_lists, recording, rules, servers, shard_checkpoint, staleness)
    _MODULES += (*runs._MODULES, *simulation._MODULES, *updates._MODULES)
    __all__ = sorted(name for module in _MODULES for name in module.__all__)
    __getattr__ = _missing_attribute(__name__, __all__)  # type checkers would accept every name

    def __dir__() -> list[str]:
        return list(__all__)
