"""A topology that ``mixing`` has no name for: each worker may meet each other one."""

from itertools import combinations

import torchmpi.parameterserver as ps


class CompleteUpdate(ps.ADPSGDUpdate):
    """AD-PSGD on the complete graph."""

    def __init__(self, network, **options):
        super().__init__(network, mixing=lambda size: ps.graph_mixing(size, combinations(range(size), 2)), **options)
