"""From the kernels' Python to LLVM's text, with Numba; only the first process on a machine comes here.

Numba's own cache would do, but then every start would load all of Numba: most of a second, and 60 MB. So its result is
taken without what ties it to Numba, put into one module, and each kernel given a wrapper that Python can call.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from llvmlite import binding

from .arrival import kernels
from .fast_path_ir import fast_path_text
from .kernel_sets import Entrance
from .wrappers import Native, Wrapper


def module_text(
    prefix: str, modules: tuple[str, ...], names: tuple[str, ...], fast_paths: Mapping[str, Entrance]
) -> str:
    """One module with these kernels of these modules, and for each a function `prefix + name` that Python can call.

    For each gate also one `prefix + "enter_" + gate`, which takes tensors.
    """
    for module in modules:
        importlib.import_module(f"{__package__}.{module}")  # which fills the list
    entering = ["find_cached_call", *sorted({entrance.enter for entrance in fast_paths.values()})] if fast_paths else []
    natives = {name: Native(kernels[name]) for name in (*names, *entering)}
    texts = [native.text for native in natives.values()]
    texts += [_plain(prefix + name, natives[name]) for name in names]
    for fast_path, entrance in fast_paths.items():
        functions = natives["find_cached_call"], natives[entrance.enter], natives[entrance.kernel]
        texts.append(fast_path_text(f"{prefix}enter_{fast_path}", *functions, entrance))
    whole = binding.parse_assembly(texts[0])
    for text in texts[1:]:
        whole.link_in(binding.parse_assembly(text))
    whole.verify()
    return str(whole)


def _plain(name: str, native: Native) -> str:
    """Numbers in, a number out."""
    wrapper = Wrapper(name)
    arguments = [wrapper.number(wrapper.argument(index)) for index in range(native.num_arguments)]
    status = wrapper.without_gil(native, arguments)
    return wrapper.finish(wrapper.as_number(status))
