"""The kernels of every instruction set against the portable ones: native_variants.cpp, for this machine and, emulated, for 64-bit ARM."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import radixrt

_NATIVE = Path(radixrt.__file__).parent / "ops" / "native"
_PROGRAM = Path(__file__).with_name("native_variants.cpp")
_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-I{_NATIVE}")
_EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
_CROSS = shutil.which("aarch64-linux-gnu-g++")
_FEATURES = {  # of /proc/cpuinfo
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
}


def _build(folder: Path, compiler: str, flags: list[str], portable_flags: list[str]) -> Path:
    """The program; the portable kernels are not optimized, which is quick, and must fuse, see native_variants.cpp."""
    variants = [path for path in _NATIVE.glob("*.cpp") if path.name not in ("module.cpp", "isa_portable.cpp")]
    for command in (
        [*_FLAGS, "-O0", *portable_flags, "-c", _PROGRAM, _NATIVE / "isa_portable.cpp"],
        [*_FLAGS, *flags, *variants, "native_variants.o", "isa_portable.o", "-o", "variants"],
    ):
        arguments = [compiler, *map(str, command)]
        done = subprocess.run(arguments, cwd=folder, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder / "variants"


def _run(*command: str) -> tuple[set[str], str]:
    """(variants that were compared, the best of them)"""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *compared, best = done.stdout.splitlines()
    return {line.split(":")[0] for line in compared}, best.removeprefix("best ")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_every_variant_of_this_machine_computes_the_same(tmp_path: Path) -> None:
    compared, best = _run(str(_build(tmp_path, "g++", ["-O0"], ["-march=native"])))
    assert {best, "portable"} <= compared
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        has = next(
            set(line.split()) for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        )
        assert compared == {"portable", *(name for name, needs in _FEATURES.items() if needs <= has)}


@pytest.mark.skipif(not _CROSS or not _EMULATOR, reason="aarch64-linux-gnu-g++ and qemu-aarch64 are not both installed")
@pytest.mark.parametrize(
    ("flags", "by_cpu"),
    [
        (["-O2"], {"max": "neon", "cortex-a53": "portable"}),  # the latter has no dot products
        (["-O0", "-march=armv8.6-a"], {"max": "neon"}),  # with those of unsigned and signed bytes
    ],
)
def test_arm_computes_the_same(flags: list[str], by_cpu: dict[str, str], tmp_path: Path) -> None:
    assert _CROSS and _EMULATOR
    program = _build(tmp_path, _CROSS, [*flags, "-static"], [])
    for cpu, best in by_cpu.items():
        assert _run(_EMULATOR, "-cpu", cpu, str(program)) == ({best, "portable"}, best)
