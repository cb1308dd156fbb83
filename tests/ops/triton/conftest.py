"""Kernels run in triton's interpreter here, on the CPU: ``tests/conftest.py`` chooses it, before anyone imports triton."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest


class _Skipped(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("the kernels need triton: pip install radixrt[gpu]", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without triton nothing of this folder is imported."""
    return None if find_spec("triton") else _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope="package")
def interpreter_as_it_should_be() -> Any:
    """Two faults of the interpreter are repaired.

    It holds bfloat16 as its 16 bits, and multiplies matrices of them as if they were integers; and triton 3.6's makes
    an index of a scalar by ``int(array of one element)``, which numpy 2.4 refuses.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return multiply(self, wide(a), wide(b), *more)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    multiply = interpreter.InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor
    with pytest.MonkeyPatch.context() as patch, np.errstate(divide="ignore", over="ignore"):  # log2(0), exp2(1000)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
        yield
