"""``AllReduceSGDEngine``: each rank takes its own batches, and all apply the same averaged gradient."""

from __future__ import annotations

from ..argument_types import checks_types
from ..errors import ArgumentError
from .all_ranks import AllRanks
from .memory_copies import Recovery
from .sgd_engine import SGDEngine


@checks_types
class AllReduceSGDEngine(SGDEngine):
    """Data-parallel training on all ranks of the current communicator. All methods are collective.

    Args:
        use_gpu: None takes ``mpi.device()``, True requires a GPU, False uses the CPU.
        asynchronous: Send gradients during the backward pass.
        device_sync: Wait for the GPU before the forward and the backward pass.
        dynamic_network: With `asynchronous`, check before each update whether the set of trainable parameters has
            changed. False saves the check for networks that do not change.
        debug: Check before each update that all ranks have the same parameters.
        prefetch: Number of batches loaded ahead in a thread; 0 loads each batch when it is needed.
        progress: Show a progress bar on standard error, on rank 0.

    Raises:
        ArgumentError: `prefetch` is negative.
        DeviceError: By ``train()`` and ``test()``: `use_gpu` is True and this rank has no GPU.
        ReplicaError: By ``train()``, on all ranks: the networks differ in names, shapes or dtypes, or with `debug` in
            values.

    Example:
        engine = AllReduceSGDEngine(asynchronous=True)
        engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=my_part, lr=0.1, max_epochs=5)
    """

    def __init__(
        self,
        use_gpu: bool | None = None,
        asynchronous: bool = False,
        device_sync: bool = True,
        dynamic_network: bool = True,
        *,
        debug: bool = False,
        prefetch: int = 1,
        progress: bool = True,
    ) -> None:
        super().__init__(prefetch=prefetch, progress=progress)
        self._coordinator: AllRanks = AllRanks(use_gpu, asynchronous, dynamic_network, debug)
        self._waits_for_gpu = device_sync

    def recover(self, every: int = 10, *, timeout: float = 60.0) -> None:
        """Let ``train()`` continue on the remaining ranks when a rank is lost, from a copy of the state in memory.

        It needs the setting ``on_lost_rank="raise"``. The remaining ranks call :func:`torchmpi.recover`, return to the
        last copy that all of them have, divide the rest of the epoch among themselves, and repeat the updates since
        then, with their hooks. Copies are taken at the beginning of each epoch and after each `every` updates; they
        contain what a checkpoint contains, and each takes its memory twice. `iterator` and `validate` of ``train()``
        must be functions, which are called again to divide the data; ``fit()`` passes such functions.

        Args:
            every: Number of updates between copies.
            timeout: As for :func:`torchmpi.recover`.

        Raises:
            ArgumentError: `every` is less than 1. By ``train()``: the setting is another one, or `iterator` or
                `validate` is not a function.

        Example:
            mpi.start()  # torchmpi run --on-lost-rank continue
            engine = AllReduceSGDEngine()
            engine.recover(every=20)
            engine.train(
                network=net, criterion=loss, lr=0.1, iterator=lambda: batches[mpi.rank() :: mpi.size()]
            )
        """
        if every < 1:
            raise ArgumentError(f"recover(every={every}): expected a number of updates")
        self._recovery = Recovery(self._coordinator, every, timeout)
