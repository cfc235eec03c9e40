"""Compile the shared-memory kernels for aarch64 and compare their instructions with the order that they ask for.

    python scripts/check_memory_order.py [--triple aarch64-unknown-linux-gnu] [--cpu generic]

On x86, plain loads and stores have acquire and release order, so that a missing one changes nothing there. On aarch64
each acquire load must be `ldar` or `ldapr`, each release store `stlr`, each fence `dmb ish`, each exchange a pair of
`ldaxr` and `stlxr`, or `casal`. The code is not optimized, so that the numbers must be equal.
The status is 0 only if they are. What the kernels ask for is checked by tests/unit/test_protocol_model.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import import_module
from unittest import mock

from llvmlite import binding

KINDS = {
    "acquire load": (r"= load atomic .* acquire", r"\b(ldar|ldapr)[bh]?\s"),
    "release store": (r"\bstore atomic .* release", r"\bstlr[bh]?\s"),
    "fence": (r"\bfence (seq_cst|acq_rel|acquire|release)", r"\bdmb\s+ish"),
    "exchange": (r"= cmpxchg .* seq_cst", r"\b(stlxr[bh]?|casal[bh]?)\s"),
}


def texts_of_kernels() -> list[str]:
    """Return the LLVM text of every function of the kernels, as compiled for the processor of --triple."""
    from torchmpi.parameterserver.kernels import SHARDING
    from torchmpi.shared_memory.compiler import compilation
    from torchmpi.shared_memory.kernels.kernel_sets import COLLECTIVES

    for kernel_set in (COLLECTIVES, SHARDING):
        for module in kernel_set.modules:
            import_module(f"{kernel_set.package}.{module}")
    wanted = [compilation.kernels[name] for each in (COLLECTIVES, SHARDING) for name in each.names]
    libraries = [kernel.native().library for kernel in wanted]
    found: dict[int, list[str]] = {}
    while libraries:
        library = libraries.pop()
        if id(library) not in found:
            found[id(library)] = library.texts
            libraries += library.used
    return [text for texts in found.values() for text in texts]


def assembly(text: str, triple: str, cpu: str) -> str:
    """Return the assembly of a module without optimization."""
    module = binding.parse_assembly(text)
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=0)
    module.triple, module.data_layout = triple, str(machine.target_data)
    return machine.emit_assembly(module)


def main() -> int:
    """Compare and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triple", default="aarch64-unknown-linux-gnu")
    parser.add_argument("--cpu", default="generic")
    options = parser.parse_args()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    with mock.patch("platform.machine", return_value=options.triple.split("-")[0]):  # for the pause of a spin
        texts = texts_of_kernels()
    code = [assembly(text, options.triple, options.cpu) for text in texts]
    wrong = 0
    for kind, (asked, done) in KINDS.items():
        num_asked = sum(len(re.findall(asked, text)) for text in texts)
        num_done = sum(len(re.findall(done, text)) for text in code)
        wrong += num_asked != num_done
        print(f"{kind:18} asked for {num_asked:4}, in {options.cpu} code {num_done:4}")
    print(f"{len(texts)} functions", "FAILED" if wrong or not texts else "ok")
    return int(wrong > 0 or not texts)


if __name__ == "__main__":
    sys.exit(main())
