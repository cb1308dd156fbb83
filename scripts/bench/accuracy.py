"""How far the native kernels' output is from the float32 reference on the same weights, and llama.cpp's beside it.

    python scripts/bench/accuracy.py [--text FILE] [--chunks 8] [--model M] [--kv-dtype int8] [--llama-bin DIR]

The text is cut into chunks of 512 tokens; the second half of each is compared, as llama.cpp's ``llama-perplexity --kl-divergence`` does, whose
figures are of the same positions: its reference is the same file, converted to float32 by ``llama-quantize``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from radixrt import Engine, SamplingParams
from radixrt.model.source import resolve

CHUNK = 512


def logits(engine: Engine, chunks: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities of the second half of each chunk, float32 ``[256, V]``."""
    found = []
    for chunk in chunks:
        engine.generate([chunk], SamplingParams(max_tokens=0), progress=False)
        match = engine._tree.match(np.array(chunk, dtype=np.int32))  # type: ignore[union-attr]
        found.append(engine._runner.logits(match.slots[CHUNK // 2 :]).log_softmax(-1))
        engine._tree.unlock(match.node)  # type: ignore[union-attr]
    return found


def ours(text: str, count: int, **settings: str | None) -> tuple[float, float, float, int]:
    """Mean and median divergence in nats, share of equal likeliest tokens, positions."""
    reference: list[torch.Tensor] = []
    divergences: list[torch.Tensor] = []
    same: list[torch.Tensor] = []
    for kernels in ("torch", "native"):
        kv = {} if kernels == "torch" else {"kv_dtype": settings["kv_dtype"]}
        with Engine(settings["model"], kernels=kernels, max_total_tokens=CHUNK * (count + 1), **kv) as engine:
            ids = engine.tokenizer.encode(text, add_special=False)
            chunks = [ids[at : at + CHUNK] for at in range(0, len(ids) - CHUNK + 1, CHUNK)][:count]
            found = logits(engine, chunks)
            if kernels == "torch":
                reference = found
                continue
            for p, q in zip(reference, found, strict=True):
                divergences.append((p.exp() * (p - q)).sum(-1))
                same.append(p.argmax(-1) == q.argmax(-1))
    divergence, equal = torch.cat(divergences), torch.cat(same)
    return float(divergence.mean()), float(divergence.median()), float(equal.float().mean()), len(divergence)


def llama(text: Path, count: int, model: Path, programs: Path) -> tuple[float, float, float]:
    """The same figures as llama.cpp reports them."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(programs)}

    def run(program: str, *arguments: str | Path) -> str:
        done = subprocess.run(
            [programs / program, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout + done.stderr

    with tempfile.TemporaryDirectory() as folder:
        wide, base = Path(folder, "f32.gguf"), Path(folder, "base")
        run("llama-quantize", "--allow-requantize", model, wide, "F32")
        common = ["-f", text, "-c", str(CHUNK), "--chunks", str(count), "--kl-divergence-base", base]
        run("llama-perplexity", "-m", wide, "-ctk", "f32", "-ctv", "f32", "-fa", "off", *common)
        report = run("llama-perplexity", "-m", model, *common, "--kl-divergence")

    def figure(name: str) -> float:
        match = re.search(rf"{name}:\s*([0-9.]+)", report)
        if match is None:
            raise SystemExit(f"llama-perplexity printed no {name!r}")
        return float(match[1])

    return figure(r"Mean\s+KLD"), figure(r"Median\s+KLD"), figure("Same top p") / 100


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "README.md", help="default: README.md")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of 512 tokens (default 8: 2,048 positions)")
    parser.add_argument("--model", help="a GGUF file; nothing: the embedded model")
    parser.add_argument("--kv-dtype", default="auto", help="of the native run")
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="folder of llama-perplexity and llama-quantize")
    options = parser.parse_args(arguments)
    text = options.text.read_text(encoding="utf-8")
    mean, median, same, positions = ours(text, options.chunks, model=options.model, kv_dtype=options.kv_dtype)
    print(f"{positions} positions, divergence from float32 in nats")
    print(f"radixrt native   mean {mean:.6f}  median {median:.6f}  same likeliest token {same:.2%}")
    if options.llama_bin:
        mean, median, same = llama(options.text, options.chunks, Path(resolve(options.model)), options.llama_bin)
        print(f"llama.cpp        mean {mean:.6f}  median {median:.6f}  same likeliest token {same:.2%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
