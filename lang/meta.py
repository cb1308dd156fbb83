"""What ``ProgramState.meta`` tells about a generation or selection."""

from __future__ import annotations

from typing import Any

from lang.graph import ProgramGraph
from radixrt.engine.nodes import Done, Select


def described(graph: ProgramGraph, done: Done, sample: int = 0) -> dict[str, Any]:
    """A result as ``meta`` gives it."""
    usage = done.usage
    samples = [
        {
            "text": output.text,
            **({"content": output.content, "reasoning": output.answer.reasoning} if output.answer is not None else {}),
            "token_ids": list(output.token_ids),
            "finish_reason": str(output.finish_reason),
            "stop_reason": output.stop_reason,
            "logprobs": output.logprobs,
        }
        for output in done.outputs
    ]
    found: dict[str, Any] = {**samples[sample], "samples": samples, "id": done.node}
    for name in usage.__slots__:
        found[name] = getattr(usage, name)
    found["completion_tokens"] = usage.generated_tokens
    choosing = done.choosing
    if choosing is not None:
        node = graph.nodes[done.node]
        assert isinstance(node, Select)
        found |= {
            "choices": [graph.written(choice) for choice in node.choices],
            "index": choosing.index,
            "scores": list(choosing.scores),
            "logprobs": list(choosing.logprobs),
            "probabilities": list(choosing.probabilities),
            "confidence": choosing.confidence,
            "choice_tokens": [list(tokens) for tokens in choosing.tokens],
            "choice_token_logprobs": [list(one) for one in choosing.token_logprobs],
        }
    return found
