"""LLVM, through llvmlite: turns LLVM code into object files, and loads those that `object_file` cannot load.

Numba's own pipeline needs a tenth of a second and more for a function; this module uses only LLVM. Importing it loads
LLVM, 40 MB: :mod:`.native_code` does that only to compile.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import binding


class Llvm:
    """LLVM for this processor, or for the processor of NUMBA_CPU_NAME."""

    def __init__(self) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self._cpu = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
        features = "" if "NUMBA_CPU_NAME" in os.environ else binding.get_host_cpu_features().flatten()
        self._features = os.environ.get("NUMBA_CPU_FEATURES", features)
        self._triple = binding.get_process_triple()
        self.processor = "\n".join((self._triple, self._cpu, self._features))
        """The processor for which code is compiled."""
        self.has_half = "+f16c" in self._features or self._triple.startswith("aarch64")
        """Whether the processor is known to convert 16-bit floats."""
        self._machine = self._new_machine()
        self._engine: Any = None

    def _new_machine(self) -> Any:
        # As in Numba: without position-independent code on x86. Its addresses have 64 bits, wherever the code lies.
        reloc = "static" if self._triple.startswith("x86_64") else "default"
        target = binding.Target.from_triple(self._triple)
        return target.create_target_machine(
            cpu=self._cpu, features=self._features, opt=2, reloc=reloc, codemodel="jitdefault", jit=True
        )

    def object_file(self, module: Any, *, is_optimized: bool) -> bytes:
        """Compile a module, or the text of one, to an object file; with `is_optimized`, let LLVM optimize it before."""
        if isinstance(module, str):
            module = binding.parse_assembly(module)
        module.triple = self._triple
        module.data_layout = str(self._machine.target_data)
        module.verify()
        if is_optimized:
            options = binding.create_pipeline_tuning_options(speed_level=2)
            builder = binding.create_pass_builder(self._machine, options)
            builder.getModulePassManager().run(module, builder)
        image: bytes = self._machine.emit_object(module)
        return image

    def load(self, image: bytes) -> None:
        """Load an object file, for `find`."""
        if self._engine is None:
            nothing = binding.parse_assembly("")
            nothing.triple = self._triple
            self._engine = binding.create_mcjit_compiler(nothing, self._new_machine())  # which owns both
        self._engine.add_object_file(binding.ObjectFileRef.from_data(image))
        self._engine.finalize_object()

    def find(self, name: str) -> int:
        """Return the address of a function of a loaded object file; 0 if there is none."""
        return int(self._engine.get_function_address(name)) if self._engine else 0
