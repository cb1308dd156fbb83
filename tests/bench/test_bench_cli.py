"""``radixrt bench``'s own arguments."""

from __future__ import annotations

import argparse

import pytest

from radixrt.bench import cli
from radixrt.errors import InvalidRequest


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(list(arguments))
    args.engine = {"threads": 1}
    return args


REFUSED = [
    (("fewshot",), "workload='fewshot': no such workload; did you mean 'few-shot'?"),
    (("chat", "--repeats", "0"), "--repeats=0: must be at least 1"),
    (("chat", "--peer-batch", "0"), "--peer-batch=0: must be at least 1"),
    (("chat", "--scale", "0"), "--scale=0.0: must be above 0 and at most 100"),
    (("chat", "--scale", "nan"), "--scale=nan: must be above 0 and at most 100"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_refused_before_anything_is_loaded(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        cli.run(parse(*arguments))
    assert str(caught.value) == message


CHOSEN = [
    ((), ["few-shot", "chat", "tree-of-thought", "unshared", "single-stream"], (), False),
    (("chat", "chat", "unshared"), ["chat", "unshared"], (), False),
    (("--cache-ab",), ["unshared"], (), True),
    (("few-shot", "--peer", "transformers"), ["few-shot"], ["transformers"], False),
]


@pytest.mark.parametrize(("arguments", "names", "peers", "cache_ab"), CHOSEN)
def test_what_is_run(
    arguments: tuple[str, ...],
    names: list[str],
    peers: list[str],
    cache_ab: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple] = []

    def instead(names, settings, **rest):  # type: ignore[no-untyped-def]
        called.append((names, settings, list(rest["peers"]), rest["cache_ab"]))
        return [], [("slower", False)] if cache_ab else []

    monkeypatch.setattr(cli, "bench", instead)
    assert cli.run(parse(*arguments)) == (1 if cache_ab else 0)
    assert called == [(names, {"threads": 1}, list(peers), cache_ab)]
