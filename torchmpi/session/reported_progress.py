"""``report_progress()``: the steps of a program with a training loop of its own, for `torchmpi top`."""

from __future__ import annotations

import math

from ..communicators.progress import BY_PROGRAM, progress
from . import runtime

__all__ = ["report_progress"]


def report_progress(step: int | None = None, *, samples: int = 0, loss: float | None = None) -> None:
    """Tell ``torchmpi top`` that this rank has ended a step. Not collective; it takes about a microsecond.

    The engines do this by themselves. Optimizers of torch count steps, without samples and loss, until the program
    reports its own.

    Args:
        step: The number of the step; None for one more than the last.
        samples: The number of examples that this rank has processed in it.
        loss: Its loss, as a number. ``loss.item()`` of a tensor on a GPU waits for the GPU.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            for x, y in batches:
                loss = criterion(model(x), y)
                loss.backward()
                mpinn.synchronize_gradients(model)
                optimizer.step()
                mpi.report_progress(samples=len(x), loss=loss.item())
    """
    runtime.current()
    progress.note(BY_PROGRAM, step, samples, math.nan if loss is None else loss)
