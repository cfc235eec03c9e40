"""What ``test()`` measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from .meters import AverageValueMeter, ClassErrorMeter
from .state import State


@dataclass(frozen=True)
class TestResult:
    """What ``test()`` measured, over the data of all ranks. `error` stays empty unless it was a
    classification.

    result = engine.test(network=net, criterion=nn.CrossEntropyLoss(), iterator=loader)
    print(result.loss.value(), result.error.value(1))
    """

    __test__ = False  # so that pytest does not take it for a test

    loss: AverageValueMeter
    error: ClassErrorMeter

    def add(self, state: State) -> None:
        """Count the batch that was just computed."""
        assert state.sample is not None and state.loss is not None
        num_rows, output, target = state.sample.num_rows, state.output, state.sample.target
        if num_rows == 0:
            return  # the mean over no rows is nan
        is_sum = getattr(state.criterion, "reduction", "mean") == "sum"
        self.loss.add(state.loss.item() / (num_rows if is_sum else 1), num_rows)
        if _is_classification(output, target):
            self.error.add(output.cpu(), target.cpu())


def _is_classification(output: object, target: object) -> bool:
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and output.dim() == 2
        and target.shape == output.shape[:1]
        and not target.is_floating_point()
    )


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode for a while.

    with evaluating(net):
        output = net(input)
    """
    # Module by module, as parts may be in evaluation mode for good.
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
