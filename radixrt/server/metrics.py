"""Metrics owns the figures of a server: what it measures itself, and the engine's totals as they are when somebody asks.

Invariants: a registry of its own, so that two servers in one process do not meet; each figure is measured once and told under radixrt's
name and under those that dashboards of vLLM and SGLang read; no label comes from what a client wrote.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from radixrt.server.client import EngineClient

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

# (key of the engine's figures, what it is, radixrt's name, the others' names)
_GAUGES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("running", "Sequences that are running", "radixrt_requests_running", ("vllm:num_requests_running", "sglang:num_running_reqs")),
    ("waiting", "Sequences that wait", "radixrt_requests_waiting", ("vllm:num_requests_waiting", "sglang:num_queue_reqs")),
    (
        "usage",
        "Share of the KV pool that running sequences hold (0 to 1); what is only cached does not count",
        "radixrt_kv_usage_ratio",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    ),
    ("held", "Tokens of the KV pool that running sequences hold", "radixrt_kv_held_tokens", ("sglang:num_used_tokens",)),
    ("pool_tokens", "Tokens that the KV pool can hold", "radixrt_kv_pool_tokens", ("sglang:max_total_num_tokens",)),
    ("pool_used", "Tokens in the KV pool, held or cached", "radixrt_kv_used_tokens", ()),
    ("hit_rate", "Share of prompt tokens found in the cache", "radixrt_hit_rate", ("sglang:cache_hit_rate",)),
    ("optimal_hit_rate", "What a cache that forgets nothing would reach", "radixrt_optimal_hit_rate", ()),
    ("programs", "Programs that are open", "radixrt_programs_running", ()),
    ("leases", "Programs that wait for a tool while their KV is kept", "radixrt_leases", ()),
    ("leased_tokens", "Tokens of the KV pool that are kept for them", "radixrt_leased_tokens", ()),
    ("up", "1: the engine answers", "radixrt_engine_up", ()),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("requests", "Requests that the engine took", "radixrt_requests", ("sglang:num_requests",)),
    (
        "prompt_tokens",
        "Prompt tokens, cached or computed",
        "radixrt_prompt_tokens",
        ("vllm:prompt_tokens", "vllm:prefix_cache_queries", "sglang:prompt_tokens"),
    ),
    (
        "cached_tokens",
        "Prompt tokens found in the cache",
        "radixrt_cached_tokens",
        ("vllm:prefix_cache_hits", "sglang:cached_tokens"),
    ),
    ("computed_tokens", "Prompt tokens that were computed", "radixrt_computed_tokens", ()),
    ("recomputed_tokens", "Tokens computed again after a preemption", "radixrt_recomputed_tokens", ()),
    (
        "generated_tokens",
        "Tokens generated",
        "radixrt_generated_tokens",
        ("vllm:generation_tokens", "sglang:generation_tokens"),
    ),
    ("forced_tokens", "Generated tokens that a constraint forced", "radixrt_forced_tokens", ()),
    ("evicted_tokens", "Tokens evicted from the cache", "radixrt_evicted_tokens", ()),
    ("preemptions", "Preemptions", "radixrt_preemptions", ("vllm:num_preemptions",)),
    ("leases_granted", "Leases: KV kept while a program waited for a tool", "radixrt_leases_granted", ()),
    ("leases_resumed", "Leases whose program came back in time", "radixrt_leases_resumed", ()),
    ("leases_expired", "Leases whose tool took longer than foretold", "radixrt_leases_expired", ()),
    ("leases_given_up", "Leases given up because others needed the room", "radixrt_leases_given_up", ()),
    ("leases_refused", "Leases refused for want of room", "radixrt_leases_refused", ()),
    ("steps", "Steps of the engine", "radixrt_steps", ()),
)


class _Usage(msgspec.Struct):
    generated_tokens: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0


class _Output(msgspec.Struct):
    finish_reason: str


class _Done(msgspec.Struct):
    """What is measured of a program's message; see ``radixrt.engine.protocol``."""

    event: str
    usage: _Usage = msgspec.field(default_factory=_Usage)
    outputs: list[_Output] = []  # msgspec copies it


_DONE = msgspec.json.Decoder(_Done)


class Histogram:
    """Counts of values up to each bound; a value costs one bisection."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's form: cumulative counts."""
        found, sum_ = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self._counts):
            sum_ += count
            found.append((bound, float(sum_)))
        return found


class Metrics:
    """The figures of one server."""

    def __init__(self, client: EngineClient, model: str | None = None) -> None:
        self._client = client
        self._model = model
        self._engine: Mapping[str, Any] = {}
        self.first_token = Histogram(_SLOW)
        self.inter_token = Histogram(_FAST)
        self.end_to_end = Histogram(_SLOW)
        self.finished: Counter[str] = Counter()  # samples, by reason
        self.refused: Counter[str] = Counter()  # requests, by the limit they met
        self.answers: Counter[tuple[str, str, int]] = Counter()  # by route, method, status
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Source(self))

    # ---- generations of programs, measured in the engine

    def measuring(self, receive: Callable[[str], None]) -> Callable[[str], None]:
        """``receive`` for messages of programs, whose generations count as those of requests do."""

        def hear(message: str) -> None:
            receive(message)
            self._program(message)

        return hear

    def _program(self, message: str) -> None:
        try:
            done = _DONE.decode(message)
        except msgspec.DecodeError:
            return
        usage, samples = done.usage, len(done.outputs)
        if done.event != "done" or not usage.generated_tokens or not samples:
            return
        first = usage.queue_time + usage.prefill_time
        self.first_token.observe(first)
        self.end_to_end.observe(first + usage.decode_time)
        more = usage.generated_tokens - samples
        if more > 0:
            self.inter_token.observe(usage.decode_time * samples / more, more)
        for output in done.outputs:
            self.finished[output.finish_reason] += 1

    # ---- what is told

    async def text(self, timeout: float = 10.0) -> bytes:
        """What ``GET /metrics`` answers."""
        await self.refresh(timeout)
        return generate_latest(self.registry)

    async def refresh(self, timeout: float = 10.0) -> None:
        """Ask the engine; one that does not say anything in time is down, and its totals are left out."""
        try:
            async with asyncio.timeout(timeout):
                stats: dict[str, Any] = dict(await self._client.stats())
        except Exception:
            self._engine = {"up": 0}
        else:
            held = stats.get("pool_used", 0) - stats.get("pool_evictable", 0)
            share = held / max(1, stats.get("pool_tokens", 1))
            self._engine = {**stats, "held": held, "usage": share, "up": 1 if self._client.healthy else 0}

    def collect(self) -> Iterator[Metric]:
        names, label = ["model_name"], [self._model or self._client.info.model]
        for key, what, name, others in _GAUGES:
            for one in (name, *others) if key in self._engine else ():
                gauge = GaugeMetricFamily(one, what, labels=names)
                gauge.add_metric(label, self._engine[key])
                yield gauge
        for key, what, name, others in _COUNTERS:
            for one in (name, *others) if key in self._engine else ():
                counter = CounterMetricFamily(one, what, labels=names)
                counter.add_metric(label, self._engine[key])
                yield counter
        for histogram, what, measured in (
            (
                self.first_token,
                "Seconds from a request to its first token",
                ("radixrt_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
            ),
            (
                self.inter_token,
                "Seconds between a sample's tokens",
                (
                    "radixrt_inter_token_seconds",
                    "vllm:inter_token_latency_seconds",
                    "vllm:time_per_output_token_seconds",
                    "sglang:inter_token_latency_seconds",
                ),
            ),
            (
                self.end_to_end,
                "Seconds from a request to its end",
                ("radixrt_request_seconds", "vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
            ),
        ):  # fmt: skip
            for one in measured:
                family = HistogramMetricFamily(one, what, labels=names)
                family.add_metric(label, histogram.buckets(), histogram.total)
                yield family
        for one, reason in (("radixrt_requests_finished", "reason"), ("vllm:request_success", "finished_reason")):
            counter = CounterMetricFamily(one, "Samples that ended, by reason", labels=[*names, reason])
            for value, count in sorted(self.finished.items()):
                counter.add_metric([*label, value], count)
            yield counter
        counter = CounterMetricFamily(
            "radixrt_requests_refused", "Requests refused, by limit", labels=[*names, "limit"]
        )
        for value, count in sorted(self.refused.items()):
            counter.add_metric([*label, value], count)
        yield counter
        counter = CounterMetricFamily(
            "radixrt_http_responses", "Answers, by route and status", labels=["route", "method", "status"]
        )
        for (route, method, status), count in sorted(self.answers.items()):
            counter.add_metric([route, method, str(status)], count)
        yield counter


def exposition(sources: Iterable[Iterable[Metric]]) -> bytes:
    """The figures of several sources, each metric with the samples of all."""
    found: dict[str, Metric] = {}
    for source in sources:
        for metric in source:
            known = found.setdefault(metric.name, metric)
            if known is not metric:
                known.samples.extend(metric.samples)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gathered(list(found.values())))
    return generate_latest(registry)


class _Gathered(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def describe(self) -> list[Metric]:
        return []


class _Source(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()

    def describe(self) -> list[Metric]:
        return []
