"""The device check: what the kernels and the engine are and reach on one GPU, in one run of a few minutes without network.

Invariants: every figure has its unit, and its goal where there is one; peaks that shares are shares of were measured in the same run; a section
that fails, hangs or breaks the device loses nothing of the others; ``--rehearse`` runs the same code on a CPU, with tiny shapes.
"""
