"""Compiles the kernels' shipped configurations without a device, and reads from each cubin what it needs.

    python -m tests.ops.triton.ahead attention rows            what the tests compile, a table
    python -m tests.ops.triton.ahead --all --targets 90 linear every configuration, for one compute capability
    python -m tests.ops.triton.ahead --json attention          one JSON object a line

It has to run in a process of its own: ``TRITON_INTERPRET`` would make the kernels plain Python.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixrt.ops.triton.ahead import Ahead

ROOT = Path(__file__).resolve().parents[3]
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block may have


@dataclass(frozen=True)
class Report:
    """What one cubin needs: registers a thread, bytes of shared memory a block, bytes of stack a thread (spills)."""

    module: str
    name: str
    target: int
    warps: int
    registers: int = 0
    shared: int = 0
    stack: int = 0
    serial: bool = False  # each product of Hopper's tensor cores is waited for before the next
    seconds: float = 0.0
    error: str = ""

    def problem(self) -> str:
        """Why this configuration cannot be shipped; empty if it can."""
        where = f"{self.module} {self.name} sm_{self.target}: "
        if self.error:
            return where + self.error
        if self.stack:
            return where + f"{self.stack} bytes of stack (spills) with {self.registers} registers"
        if self.shared > SHARED_LIMIT[self.target]:
            return where + f"{self.shared} bytes of shared memory, of {SHARED_LIMIT[self.target]}"
        return ""


def compiled(module: str, everything: bool = False, timeout: float = 900) -> list[Report]:
    """The reports of ``radixrt.ops.triton.<module>``, compiled in a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.ahead", "--json", module, *(["--all"] if everything else [])]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [Report(**json.loads(line)) for line in done.stdout.splitlines()]


def reports(modules: Iterable[str], targets: Iterable[int], everything: bool, match: str = "") -> Iterator[Report]:
    """Compile here what ``modules`` ship for ``targets``."""
    for module in modules:
        names: set[str] = set()
        for entry in importlib.import_module(f"radixrt.ops.triton.{module}").configurations():
            if entry.name in names:
                raise ValueError(f"{module}: two configurations are named {entry.name}")
            names.add(entry.name)
            if match in entry.name and (everything or entry.often):
                yield from (report(module, entry, target) for target in targets if target in entry.targets)


def report(module: str, entry: Ahead, target: int) -> Report:
    """Compile one configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = entry.kernel.arg_names
    absent = [name for name in names if name not in entry.types and name not in entry.constants]
    unknown = [name for name in (*entry.types, *entry.constants, *entry.divisible) if name not in names]
    if absent or unknown:
        raise ValueError(f"{module} {entry.name}: arguments left out: {absent}; no arguments of the kernel: {unknown}")
    signature = {name: entry.types.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in entry.divisible]
    source = ASTSource(
        entry.kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in entry.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    start = time.perf_counter()
    try:
        binary = triton.compile(
            source,
            target=GPUTarget("cuda", target, 32),
            options={"num_warps": entry.num_warps, "num_stages": entry.num_stages},
        )
    except Exception as error:
        return Report(module, entry.name, target, entry.num_warps, error=f"{type(error).__name__}: {error}"[:2000])
    registers, stack, serial = _resources(binary.asm["cubin"], target)
    warps = getattr(binary.metadata, "num_warps", entry.num_warps)  # warp specialization adds some
    seconds = round(time.perf_counter() - start, 2)
    return Report(module, entry.name, target, warps, registers, binary.metadata.shared, stack, serial, seconds)


def _resources(cubin: bytes, target: int) -> tuple[int, int, bool]:
    """Registers and bytes of stack of the one kernel in ``cubin``, and whether its ``wgmma`` are serialized."""
    from triton.backends import nvidia

    tools = Path(next(iter(nvidia.__path__))) / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def said(tool: str, option: str) -> str:
            return subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout

        usage = said("cuobjdump", "--dump-resource-usage")
        code = said("nvdisasm", "-c") if target == 90 else ""  # others have no wgmma, and it takes its time
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump said nothing of registers: {usage!r}")
    # ptxas serializes all of a function or nothing; then a wait follows each instruction of every product.
    serial = code.count("HGMMA") > 0 and code.count("WARPGROUP.DEPBAR") >= code.count("HGMMA")
    return int(found[1]), int(found[2]), serial


def main() -> int:
    """The command line described in the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops.triton.ahead", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="of radixrt.ops.triton: attention, rows, ...")
    parser.add_argument("--all", action="store_true", help="every configuration, not only those of the tests")
    parser.add_argument("--targets", default="80,90,100", metavar="CC,...", help="compute capabilities (80,90,100)")
    parser.add_argument("--match", default="", metavar="TEXT", help="only configurations whose name has this in it")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: there is nothing to compile in the interpreter")
    failed = False
    for found in reports(options.modules, [int(t) for t in options.targets.split(",")], options.all, options.match):
        failed |= bool(found.problem())
        if options.json:
            print(json.dumps(asdict(found)), flush=True)
        else:
            print(
                f"{found.module:10} {found.name:36} sm_{found.target:<4} {found.warps} warps"
                f" {found.registers:4} registers"
                f" {found.shared:7} B shared {found.stack:5} B stack {found.seconds:6.1f} s"
                f"  {'serial ' * found.serial}{found.error}",
                flush=True,
            )
    return 1 if failed and not options.json else 0


if __name__ == "__main__":
    sys.exit(main())
