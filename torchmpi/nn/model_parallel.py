"""Model parallelism: a linear layer with its input features divided over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime
from .functional import linear_map
from .layer_comm import LayerComm
from .sharding import KeepsShards, set_sharded

_NOUN = "an MPLinear"


@checks_types
class MPLinear(KeepsShards):
    """``nn.Linear`` with its input features divided over the ranks, for weights too large for one device. Collective.

    Input and output are complete and equal on all ranks; each rank stores only its columns of the weight and computes a
    partial output, and the partial outputs are added. The layer can be used anywhere in a replicated net whose
    *batches are the same on all ranks of* `comm`. With the same seed on all ranks the initial weights are those of
    ``nn.Linear``.

    ``weight`` is marked by :func:`~torchmpi.nn.set_sharded`: the ``synchronize_*`` functions and checks treat it as a
    tensor of the ranks of `data_comm`. ``bias`` is replicated.

    Args:
        in_features: Size of the last dimension of the input; need not be divisible by the number of ranks.
        out_features: Size of the last dimension of the output.
        bias: Add a bias.
        comm: Ranks over which the layer is divided; default: the current communicator.
        data_comm: Ranks that hold the same columns and are trained on different data; default: as for ``set_sharded``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ArgumentError: `data_comm` is needed or wrong; in the forward pass: the input does not have `in_features`
            features, or, on all ranks of `comm` in the first pass, the ranks have different inputs.

    Example:
        layer = mpinn.MPLinear(784, 10)
        layer(x).sum().backward()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Comm = None,
        data_comm: Comm = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._layer_comm = LayerComm(runtime.communicator(comm), _NOUN)
        # The complete weight is initialized, so that values and generator state do not depend on the number of ranks.
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight = nn.Parameter(self.select_columns(full.weight.detach()).clone())
        self.bias = full.bias
        set_sharded(self.weight, comm=comm, data_comm=data_comm)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to the complete input."""
        if input.shape[-1] != self.in_features:
            raise ArgumentError(
                f"{rank_prefix()}MPLinear({self.in_features}, {self.out_features}) got an input of shape "
                f"{list(input.shape)}. Pass the complete input, with {self.in_features} features in the last dimension."
            )
        layer_comm = self._layer_comm
        layer_comm.check_same_input(input)
        partial_output = nn.functional.linear(linear_map(input, layer_comm.narrow, layer_comm.gather), self.weight)
        output = linear_map(partial_output, layer_comm.reduce, layer_comm.replicate)
        return output if self.bias is None else output + self.bias.to(output.dtype)  # autocast does not cast sums

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """Gather the weight of the equivalent ``nn.Linear`` on every rank. Collective.

        Returns:
            A tensor of shape (out_features, in_features).

        Example:
            torch.save(layer.full_weight(), "weight.pt")
        """
        return self.gather_columns(self.weight)

    @torch.no_grad()
    def gather_columns(self, tensor: Tensor) -> Tensor:
        """Gather a tensor of the shape of ``weight``, such as its momentum, on every rank. Collective.

        Args:
            tensor: This rank's columns.

        Returns:
            A tensor of shape (out_features, in_features).

        Example:
            momentum = layer.gather_columns(optimizer.state[layer.weight]["momentum_buffer"])
        """
        return self._layer_comm.gather(tensor)

    def select_columns(self, whole: Tensor) -> Tensor:
        """Return this rank's columns of a tensor of shape (out_features, in_features).

        Args:
            whole: The complete tensor, for instance the weight of an ``nn.Linear``.

        Returns:
            A view of `whole`.

        Example:
            layer.load_state_dict({**linear.state_dict(), "weight": layer.select_columns(linear.weight)})
        """
        return self._layer_comm.narrow(whole)

    def extra_repr(self) -> str:
        """Describe the layer, for ``repr``."""
        return (
            f"in_features={self.in_features} ({self.weight.shape[1]} here), "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._layer_comm is None:  # a pickle contains no communicator, which would be invalid in another job
            self._layer_comm = LayerComm(runtime.communicator(None), _NOUN)
            set_sharded(self.weight)
