"""The dashboard shows what a server really tells: every metric it names is there, and no metric is missing on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.stand import Stand, served

FOLDER = Path(__file__).parents[2] / "examples" / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_METRIC = re.compile(r"(?<![\w:])[a-zA-Z_][\w:]*(?=\s*[{\[])|\b(?:radixrt|vllm|sglang)[\w:]*")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def expressions() -> list[str]:
    queries = [target["expr"] for panel in SHOWN for target in panel["targets"]]
    variables = [item["definition"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"]
    return queries + variables


def metrics_of(expression: str) -> set[str]:
    """The names of the metrics in a query; those of the selectors in it, and nothing in quotes or groupings."""
    plain = _GROUPING.sub("", _STRING.sub('""', expression))
    plain = re.sub(r"label_values\((\w+),[^)]*\)", r"\1", plain)
    return set(_METRIC.findall(plain))


def labels_of(expression: str) -> set[str]:
    plain = _STRING.sub('""', expression)
    found = {label.strip() for group in _GROUPING.findall(plain) for label in group.split(",")}
    for selector in re.findall(r"\{([^}]*)\}", plain):
        found |= set(_LABEL.findall(selector))
    return found


@pytest.fixture
async def live(local_client: Any) -> dict[str, tuple[str, set[str]]]:
    """Of each sample name of a server that has answered and refused: its family, and its labels."""
    async with served(local_client, served_model_name=("tiny",), max_body_bytes=1024) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert answer.status == 200, await answer.text()
        assert (await client.post("/v1/completions", data=b"x" * 1025)).status == 413
        text = await (await client.get("/metrics")).text()
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        labels = {name for sample in family.samples for name in sample.labels}
        assert family.samples, family.name  # else its labels could not be known
        for ending in _SAMPLES[family.type]:
            found[family.name + ending] = (family.name, labels)
    return found


async def test_every_metric_of_a_panel_is_one_that_a_server_tells(live: Any) -> None:
    assert len(expressions()) > 30
    for expression in expressions():
        names = metrics_of(expression)
        assert names, expression
        for name in names:
            assert name in live, f"{name}: in {expression}"
            labels = live[name][1] | {"instance", "job"}
            assert labels_of(expression) <= labels, expression


async def test_every_metric_that_a_server_tells_is_on_a_panel(live: Any) -> None:
    used = {live[name][0] for expression in expressions() for name in metrics_of(expression)}
    assert {family for family, _ in live.values() if family.startswith("radixrt_")} <= used


async def test_the_check_sees_what_is_wrong() -> None:
    query = 'sum by (le, route) (rate(radixrt_x_bucket{model_name=~"$model", a!="radixrt_y{b=1}"}[$__rate_interval]))'
    assert metrics_of(query) == {"radixrt_x_bucket"} and labels_of(query) == {"le", "route", "model_name", "a"}
    assert metrics_of("rate(other_thing_total[5m]) / vllm:x_total") == {"other_thing_total", "vllm:x_total"}
    assert metrics_of("label_values(radixrt_up, instance)") == {"radixrt_up"}


async def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert DASHBOARD["id"] is None and DASHBOARD["schemaVersion"] >= 39 and DASHBOARD["title"] == "radixrt"
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert cells and max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {item["name"] for item in DASHBOARD["templating"]["list"]}
    for panel in SHOWN:
        assert panel["title"] and panel["description"], panel["id"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        marks = [target["refId"] for target in panel["targets"]]
        assert len(set(marks)) == len(marks)
    for expression in expressions():
        for name in re.findall(r"\$(\w+)", expression):
            assert name in variables or name == "__rate_interval", expression
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
    assert {panel["title"] for panel in PANELS if panel["type"] == "row"} == {
        "Now", "Requests", "Latency", "Prefix cache", "KV pool", "Engine"
    }  # fmt: skip


async def test_the_scrape_example_reaches_a_server() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (group,) = job["static_configs"]
    assert group["targets"] == ["127.0.0.1:8000"]  # where radixrt serve listens
    async with served(Stand()) as client:
        answer = await client.get(job["metrics_path"])
        assert answer.status == 200 and answer.content_type == "text/plain"
