"""The benchmark room: seeded workloads, the backends that run them, and the report that sets them side by side.

Invariants: no workload needs a data set; every backend runs the same token ids with the same token counts; a timing
is only ever shown with the machine it was taken on, and as a ratio to something measured in the same run.
"""
