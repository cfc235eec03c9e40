"""The compiled code of the parameter server: passes over shards, and the rules that they apply."""

from ...shared_memory.kernels.kernel_sets import KernelSet

SHARDING = KernelSet(
    "sharding", __name__, ("shard_passes",), (("pass_over", "pass_over_rows", "count_step", "end_chunk", "take_over"),),
    "parameter-server kernels", 2, entries="request_code",
)  # fmt: skip
