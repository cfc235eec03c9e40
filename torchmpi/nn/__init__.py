"""Data-parallel and model-parallel training of ``torch.nn`` modules."""

from typing import TYPE_CHECKING

from ..other_names import missing_attribute
from . import functional
from .async_backward import (
    no_sync,
    register_async_backward,
    synchronize_gradients_async,
    unregister_async_backward,
)
from .blocksequential import BlockSequential
from .clipping import clip_grad_norm_, clip_grad_value_
from .diloco import DiLoCoUpdate
from .error_feedback import EightBit, GradientCompressor, PowerSGD, TopK
from .experts import MixtureOfExperts
from .full_state import full_state_dict, load_full_state_dict
from .join import join
from .local_sgd import LocalSGDUpdate
from .model_parallel import MPLinear
from .optimizer import DistributedOptimizer
from .replica_check import check_with_allreduce
from .replica_watch import watch_replicas
from .sampler import DistributedSampler
from .sharding import Sharding, set_sharded, sharding_of
from .sync import synchronize_gradients, synchronize_parameters
from .sync_batchnorm import SyncBatchNorm
from .tensor_parallel import tensor_parallel
from .tensor_plan import TensorSplit

__all__ = [
    "BlockSequential",
    "DiLoCoUpdate",
    "DistributedOptimizer",
    "DistributedSampler",
    "EightBit",
    "GradientCompressor",
    "LocalSGDUpdate",
    "MPLinear",
    "MixtureOfExperts",
    "PowerSGD",
    "Sharding",
    "SyncBatchNorm",
    "TensorSplit",
    "TopK",
    "check_with_allreduce",
    "clip_grad_norm_",
    "clip_grad_value_",
    "full_state_dict",
    "functional",
    "join",
    "load_full_state_dict",
    "no_sync",
    "register_async_backward",
    "set_sharded",
    "sharding_of",
    "synchronize_gradients",
    "synchronize_gradients_async",
    "synchronize_parameters",
    "tensor_parallel",
    "unregister_async_backward",
    "watch_replicas",
]


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = missing_attribute(__name__, __all__)
