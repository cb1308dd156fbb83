"""The one part that needs a compiler: the grammar automaton. Without one the Python reference runs instead."""

import sys

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "radixrt.grammar._native",
            sources=["radixrt/grammar/native/module.cpp"],
            depends=[
                f"radixrt/grammar/native/{name}.hpp"
                for name in (
                    "nfa",
                    "vocabulary",
                    "configurations",
                    "automaton",
                    "flatten",
                    "objects",
                    "chars",
                    "spell",
                    "regular",
                )
            ],
            language="c++",
            extra_compile_args=["/O2", "/std:c++17"] if sys.platform == "win32" else ["-O3", "-std=c++17"],
            optional=True,
        )
    ]
)
