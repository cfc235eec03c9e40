"""Write the assembly of the compiled kernels, or compare it with that of another version of the sources.

    python benchmarks/kernel_assembly.py --write FOLDER
    python benchmarks/kernel_assembly.py --compare FOLDER [--show NAME]

A change of notation leaves the assembly as it is: write it before the change, compare it afterwards. Functions are
compared by name and text; names of other functions, labels and addresses of the constants do not count. The status is 0
only if all are equal. `--show` prints the difference of one function.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

from llvmlite import binding

from torchmpi.parameterserver.kernels import SHARDING
from torchmpi.shared_memory.compiler import compilation
from torchmpi.shared_memory.compiler.llvm import Llvm
from torchmpi.shared_memory.kernels.kernel_sets import COLLECTIVES, KernelSet

_SYMBOL = re.compile(r"_ZN[\w.$]+")
_NUMBERED = re.compile(r"\b(message)\.\d+")
_LABEL = re.compile(r"\.(LBB|LCPI|Ltmp|LJTI|Lfunc_end)[\d_]+")
_FUNCTION = re.compile(r"^(?:\"[^\"]+\"|[A-Za-z_][\w.$]*):")


def _plain_name(symbol: str) -> str:
    """Return the name of a function without the module and the types of Numba's symbol."""
    parts, rest = [], symbol.removeprefix("_ZN")
    while found := re.match(r"\d+", rest):
        length = int(found[0])
        parts.append(rest[found.end() : found.end() + length])
        rest = rest[found.end() + length :]
    return next((part for part in reversed(parts) if not part.startswith(("B", "c8tJTI", "_3c", "v"))), symbol)


def functions_of(kernel_set: KernelSet, number: int) -> dict[str, list[str]]:
    """Return the assembly of the functions of a part of a set of kernels, by name; several may have one name."""
    for module in kernel_set.modules:
        import_module(f"{kernel_set.package}.{module}")
    llvm, names = Llvm(), kernel_set.parts[number]
    whole = compilation.link("k_", [compilation.plain(f"k_{name}", compilation.kernels[name]) for name in names])
    whole.triple, whole.data_layout = llvm._triple, str(llvm._machine.target_data)
    builder = binding.create_pass_builder(llvm._machine, binding.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(whole, builder)
    found: dict[str, list[str]] = defaultdict(list)
    texts: list[str] | None = None
    for line in llvm._machine.emit_assembly(whole).splitlines():
        if _FUNCTION.match(line):
            texts = found[_plain_name(line.split(":")[0].strip('"'))]
            texts.append("")
        elif texts is not None and line.startswith("\t") and not line.startswith("\t."):
            code = _SYMBOL.sub(lambda match: _plain_name(match[0]), line.split("#")[0].strip())
            texts[-1] += _NUMBERED.sub(r"\1", _LABEL.sub(r".\1", code)) + "\n"
    return {name: sorted(filter(None, known)) for name, known in found.items() if any(known)}


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--compare", type=Path, metavar="FOLDER")
    parser.add_argument("--show", metavar="NAME", default="")
    options = parser.parse_args()
    if (options.write is None) == (options.compare is None):
        parser.error("give --write FOLDER or --compare FOLDER")
    num_different = 0
    for kernel_set in (COLLECTIVES, SHARDING):
        which = kernel_set.name
        for number in range(len(kernel_set.parts)):
            functions = functions_of(kernel_set, number)
            if options.write is not None:
                folder = options.write / f"{which}_{number}"
                folder.mkdir(parents=True, exist_ok=True)
                for name, texts in functions.items():
                    (folder / f"{name}.s").write_text("\n".join(texts))
                print(f"{which} {number}: {len(functions)} functions")
                continue
            folder = options.compare / f"{which}_{number}"
            before = {path.stem: path.read_text() for path in folder.glob("*.s")}
            after = {name: "\n".join(texts) for name, texts in functions.items()}
            same = [name for name in after if after[name] == before.get(name)]
            print(
                f"{which} {number}: {len(same)} of {len(after)} functions are equal; "
                f"{sum(text.count(chr(10)) for text in before.values())} lines before, "
                f"{sum(text.count(chr(10)) for text in after.values())} after"
            )
            for name in sorted({*before, *after} - {*same}):
                old, new = (texts.get(name, "").splitlines() for texts in (before, after))
                difference = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=2))
                changed = sum(line[0] in "+-" for line in difference) - 2
                print(f"    {name}: {len(old)} -> {len(new)} lines, {changed} differ")
                num_different += 1
                if name == options.show:
                    print("\n".join(difference))
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
