"""The parts that need a compiler: the grammar automaton and the CPU kernels. Without one the Python and torch references run instead."""

import sys
from pathlib import Path

from setuptools import Extension, setup

_WINDOWS = sys.platform == "win32"


def _native(name: str, folder: str, sources: list[str], *flags: str) -> Extension:
    return Extension(
        name,
        sources=[f"{folder}/{source}" for source in sources],
        depends=sorted(str(path) for path in Path(folder).glob("*.hpp")),
        language="c++",
        extra_compile_args=["/O2", "/std:c++17"] if _WINDOWS else ["-O3", "-std=c++17", *flags],
        extra_link_args=[] if _WINDOWS else ["-pthread"],
        optional=True,
    )


_VARIANTS = (
    "avx512",
    "avxvnni",
    "avx2",
    "neon",
    "portable",
)  # each compiled for its own instruction set, one is chosen at run time

setup(
    ext_modules=[
        _native("radixrt.grammar._native", "radixrt/grammar/native", ["module.cpp"]),
        _native(
            "radixrt.ops._native",
            "radixrt/ops/native",
            ["module.cpp", "cpu.cpp", *(f"isa_{name}.cpp" for name in _VARIANTS)],
            "-pthread",
            "-ffp-contract=off",  # a multiplication and an addition are fused only where the source says so, whatever the machine
            "-fno-math-errno",
            "-fno-trapping-math",
        ),
    ]
)
