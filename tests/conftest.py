"""Settings for every test: one thread, since a busy neighbour makes two of them collapse; no network; and where there
is no CUDA device, Triton kernels that run in its interpreter.

Which does not mean that they are used: a CPU engine goes the host's way unless a test says otherwise.
"""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

torch.set_num_threads(1)


def interpret_kernels() -> None:
    """Let this process decorate kernels for the interpreter, and nobody else: neither `has_kernels` nor processes that
    tests start may find the variable."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton.runtime import interpreter

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes int() of a one-element array for the bounds of an interpreted loop, which NumPy 2.4
        refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index
    run = interpreter.GridExecutor.__call__

    def run_without_warnings(self: Any, *args: Any, **kwargs: Any) -> None:
        """As on a device, where a product of zero and infinity is NaN and no warning: rows of a padded pass that belong
        to nobody are made of whatever the memory held."""
        with np.errstate(all="ignore"):
            run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = run_without_warnings
    hasten_interpreter(interpreter)


def hasten_interpreter(interpreter: Any) -> None:
    """What it finds out anew for every call and every operation, it finds out once, or when somebody asks."""
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = find_dtype(scalar)
        return dtypes[scalar.name]

    interpreter._get_np_dtype = np_dtype
    core = interpreter.tl.core
    find_field = core.tuple.__getattr__

    def hold(self: Any, values: Any, type: Any = None) -> None:
        self.values = list(values)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def find_type(self: Any, name: str) -> Any:
        if name != "type":
            return find_field(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = hold, find_type


if find_spec("triton") is not None and not torch.cuda.is_available():
    interpret_kernels()

# A machine that only measures or only tests kernels need not have what a server or llama.cpp's reader is made of.
collect_ignore_glob = [
    pattern
    for package, pattern in (
        ("fastapi", "test_server*.py"),
        ("fastapi", "test_dashboard*.py"),
        ("gguf", "test_gguf.py"),
    )
    if find_spec(package) is None
]
