"""The page: what it reads says what the engine has, shows nobody what is not theirs, and in a browser it does what a person wants of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
from contextlib import aclosing
from html.parser import HTMLParser
from typing import Any

import aiohttp
import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from radixrt import SamplingParams
from radixrt.server import page
from radixrt.server.config import ServerConfig
from radixrt.server.limits import Gate
from radixrt.server.local import LocalClient
from radixrt.server.metrics import Metrics
from radixrt.server.page import describe
from radixrt.server.process import ProcessClient
from tests.server.person import Steered, sat, seen
from tests.server.stand import KEY, Stand, error_of, reachable, served, until

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>&lt;\u202eevil"


async def say(client: LocalClient, text: str, tokens: int = 4, **more: Any) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    async with aclosing(client.stream(text, params, request_id=f"r {text} {more}", **more)) as items:
        async for _ in items:
            pass


async def tree_of(client: Any, path: str = "/v1/tree", **headers: str) -> dict[str, Any]:
    answer = await client.get(path, headers=headers)
    assert answer.status == 200, await answer.text()
    return dict(await answer.json())


# ---- what it reads


async def test_the_tree_is_what_was_said(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    async with served(local_client) as client:
        assert (await tree_of(client))["nodes"] == []
        for text in ("the same beginning: one", "the same beginning: two", "something else"):
            await say(local_client, text)
        found = await tree_of(client, "/v1/tree?nodes=100")
        nodes = {node["id"]: node for node in found["nodes"]}
        assert len(nodes) == len(found["nodes"]) == found["stats"]["cache_nodes"]
        assert sum(node["tokens"] for node in nodes.values()) == found["cached_tokens"] == found["stats"]["pool_used"]
        (shared,) = [node for node in nodes.values() if node["text"].endswith("the same beginning: ")]
        below = [node for node in nodes.values() if node["parent"] == shared["id"]]
        assert {node["text"][:3] for node in below} >= {"one"} and len(below) == shared["children"] == 2
        assert all(node["locks"] == 0 and node["age"] >= 0 and not node["cut"] for node in nodes.values())
        few = (await tree_of(client, "/v1/tree?nodes=2"))["nodes"]
        assert len(few) == 2 and few[0]["parent"] is None


async def test_running_requests_stand_where_their_prefix_ends(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    prompt, params = "a long prompt that somebody reads", SamplingParams(max_tokens=400, ignore_eos=True)
    async with served(local_client) as client, aclosing(local_client.stream(prompt, params, request_id="me")) as items:
        await anext(items)
        found = await tree_of(client)
        (request,) = [one for one in found["requests"] if one["id"] == "me"]
        nodes = {node["id"]: node for node in found["nodes"]}
        assert request["running"] and request["size"] > request["prompt"] and nodes[request["node"]]["locks"] == 1
        assert nodes[request["node"]]["age"] == -1.0


async def test_long_nodes_are_shown_by_their_ends(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    await say(local_client, "".join(f"{i:03}," for i in range(60)), tokens=1)
    async with served(local_client) as client:
        (node,) = (await tree_of(client))["nodes"]
    assert node["cut"] and node["text"].startswith("000,001,") and "059," in node["end"]
    assert len(node["text"]) + len(node["end"]) <= 64


async def test_texts_are_shown_only_where_one_party_uses_the_server(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    await say(local_client, "what the one with a salt said", cache_salt="s")
    await say(local_client, "what everybody may read")
    for settings, shows in (
        ({}, True),
        ({"api_key": KEY}, True),
        ({"api_key": [KEY, "another"]}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_key": KEY}, True),
    ):
        async with served(local_client, **settings) as client:
            found = await tree_of(client, **{"X-Api-Key": KEY})
            said = json.dumps(found)
            assert ("everybody" in said) == found["texts"] == shows and "with a salt" not in said
            assert {node["space"] for node in found["nodes"]} == {0, 1}


@pytest.mark.slow
async def test_an_engine_in_a_process_of_its_own_tells_the_same(server_settings: dict[str, Any]) -> None:
    client = ProcessClient(server_settings)
    await client.start()
    try:
        async with served(client) as page:
            assert (await page.post("/v1/programs", json=GRAPH)).status == 200
            found = await tree_of(page)
            assert found["cached_tokens"] == sum(node["tokens"] for node in found["nodes"]) > 0
            assert found["nodes"][0]["text"].startswith("hello ") and found["stats"]["programs"] == 0
            (run,) = (await tree_of(page, "/v1/runs"))["runs"]
            assert run["name"] == "pair" and len(run["nodes"]) == 7
            assert (await tree_of(page, f"/v1/runs?known={run['number']}"))["runs"] == []
    finally:
        await client.close()


BAD = ("nodes=0", "nodes=501", "nodes=-1", "nodes=1.5", "nodes=", "nodes=x", "nodes=%D9%A1", "nodes=99999999999")


@pytest.mark.parametrize("query", BAD)
async def test_a_wrong_number_of_nodes_is_refused(query: str) -> None:
    async with served(Stand()) as client:
        answer = await client.get(f"/v1/tree?{query}")
        assert answer.status == 400 and (await error_of(answer))["param"] == "nodes"


@pytest.mark.parametrize("query", ["a", "1,,2", "-1", ",", "1" * 16, ",".join("1" * 65)])
async def test_wrong_known_numbers_are_refused(query: str) -> None:
    async with served(Stand()) as client:
        answer = await client.get(f"/v1/runs?known={query}")
        assert answer.status == 400 and (await error_of(answer))["param"] == "known"


async def test_however_many_look_the_engine_is_asked_once() -> None:
    class Counting(Stand):
        asked_for = 0

        async def tree(self, most: int) -> dict[str, Any]:
            self.asked_for += 1
            await asyncio.sleep(0)
            return await super().tree(most)

    stand = Counting()
    async with served(stand) as client:
        answers = await asyncio.gather(*(client.get("/v1/tree") for _ in range(40)))
        assert {answer.status for answer in answers} == {200} and stand.asked_for <= 2


async def test_different_questions_wait_for_each_other() -> None:
    class Slow(Stand):
        asked_for = at_once = most_at_once = 0

        async def tree(self, most: int) -> dict[str, Any]:
            self.asked_for += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            await asyncio.sleep(0)
            self.at_once -= 1
            return await super().tree(most)

    stand = Slow()
    async with served(stand) as client:
        paths = [f"/v1/tree?nodes={nodes}" for nodes in range(1, 13)]
        answers = await asyncio.gather(*(client.get(path) for path in paths))
        assert {answer.status for answer in answers} == {200} and stand.asked_for == 12 and stand.most_at_once == 1


async def test_an_engine_that_is_gone_is_told() -> None:
    stand = Stand()
    stand.error = RuntimeError("broken")
    async with served(stand) as client:
        assert (await client.get("/v1/tree")).status == 500


SCHEMAS: list[tuple[str, str | None]] = [
    ('{"type": "object", "properties": {"a": {"type": "integer"}}}', None),
    ("true", None),
    ('{"type": "object"', "not JSON|is not"),
    ('{"type": "objekt"}', "type"),
    ('{"$ref": "https://example.org/schema"}', "ref"),
    ("[" * 5000, "nested|deep"),
]


@pytest.mark.parametrize("text, problem", SCHEMAS, ids=[text[:20] for text, _ in SCHEMAS])
async def test_a_schema_is_judged(text: str, problem: str | None) -> None:
    async with served(Stand()) as client:
        answer = await client.post("/v1/schema/check", json={"schema": text})
        found = await answer.json()
        assert answer.status == 200 and found["valid"] == (problem is None)
        assert problem is None or re.search(problem, found["problem"])


@pytest.mark.parametrize("body, param", [({"schema": 3}, "schema"), ({}, "schema"), ({"schema": "x" * 70_000}, "schema"), ({"schema": "1", "a": 1}, "a")])  # fmt: skip
async def test_what_is_no_check_is_refused(body: dict[str, Any], param: str) -> None:
    async with served(Stand()) as client:
        answer = await client.post("/v1/schema/check", json=body)
        assert answer.status == 400 and (await error_of(answer))["param"] == param


# ---- programs

GRAPH: dict[str, Any] = {
    "version": 1,
    "name": "pair",
    "stream": False,
    "nodes": [
        {"id": 0, "kind": "text", "parent": None, "parts": ["hello "]},
        {"id": 1, "kind": "fork", "parent": 0, "count": 2},
        {"id": 2, "kind": "gen", "parent": 1, "name": "left", "params": {"max_tokens": 3, "ignore_eos": True}},
        {"id": 3, "kind": "gen", "parent": 1, "name": "right", "params": {"max_tokens": 2, "ignore_eos": True}},
        {"id": 4, "kind": "text", "parent": 0, "parts": ["both: ", {"ref": 2}, {"ref": 3}]},
        {"id": 5, "kind": "select", "parent": 4, "name": "which", "choices": [["a"], ["b"]]},
        {"id": 6, "kind": "gen", "parent": 5, "name": "late", "params": {"max_tokens": 1}, "sample": 7},
    ],
}


async def test_programs_are_remembered_as_graphs(local_client: LocalClient) -> None:
    async with served(local_client) as client:
        assert (await client.post("/v1/programs", json=GRAPH)).status == 200
        found = await tree_of(client, "/v1/runs")
        run = found["runs"][0]
        nodes = {node["id"]: node for node in run["nodes"]}
        assert run["name"] == "pair" and run["over"] and run["more"] == 0 and run["seconds"] > 0
        assert [nodes[i]["kind"] for i in range(7)] == [node["kind"] for node in GRAPH["nodes"]]
        assert [nodes[i]["parent"] for i in range(7)] == [node["parent"] for node in GRAPH["nodes"]]
        assert nodes[4]["needs"] == [2, 3] and nodes[4]["text"].startswith("both: ")
        assert nodes[2]["tokens"][2] == 3 and nodes[3]["tokens"][2] == 2 and nodes[5]["text"] in ("a", "b")
        assert all(len(nodes[i]["times"]) == 4 and min(nodes[i]["times"]) >= 0 for i in (2, 3, 5))
        assert nodes[6]["state"] == "failed" and "sample" in nodes[6]["error"]
        again = await tree_of(client, f"/v1/runs?known={run['number']}")
        assert run["number"] in again["numbers"] and all(one["number"] != run["number"] for one in again["runs"])


async def test_of_a_salted_program_nothing_is_shown_but_its_shape(local_client: LocalClient) -> None:
    async with served(local_client) as client:
        assert (await client.post("/v1/programs", json={**GRAPH, "cache_salt": "s"})).status == 200
        run = (await tree_of(client, "/v1/runs"))["runs"][0]
        assert run["private"] and len(run["nodes"]) == 7
        assert not re.search("hello|pair|left|both", json.dumps(run))
        assert not any("error" in node for node in run["nodes"])


async def test_what_is_remembered_of_programs_is_bounded(local_client: LocalClient) -> None:
    long = {"id": 0, "kind": "text", "parent": None, "parts": ["x" * 10_000]}
    chain = [{"id": i, "kind": "text", "parent": i - 1, "parts": ["y"]} for i in range(1, 300)]
    end = {"id": 300, "kind": "select", "parent": 0, "choices": [["a"], ["b"]]}
    short = {"version": 1, "nodes": [{"id": 0, "kind": "text", "parent": None, "parts": ["x"]}], "stream": False}
    async with served(local_client) as client:
        big = {"version": 1, "nodes": [long, *chain, end], "stream": False}
        assert (await client.post("/v1/programs", json=big)).status == 200
        run = (await tree_of(client, "/v1/runs"))["runs"][0]
        assert len(run["nodes"]) == 120 and run["more"] == 181 and len(json.dumps(run)) < 20_000
        for _ in range(30):
            assert (await client.post("/v1/programs", json=short)).status == 200
        assert len((await tree_of(client, "/v1/runs?known=0"))["numbers"]) == 24


# ---- the page itself


class Parts(HTMLParser):
    """Scripts, styles and addresses of a page, as a browser would find them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {"script": [], "style": []}
        self.inline: list[str] = []
        self.addresses: list[str] = []
        self._in = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag if tag in self.found else ""
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action")]

    def handle_data(self, data: str) -> None:
        if self._in:
            self.found[self._in].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


async def test_the_page_needs_no_key_and_lets_only_itself_in() -> None:
    async with served(Stand(), api_key=KEY) as client:
        answer = await client.get("/")
        html, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.status == 200 and KEY not in html and "unsafe" not in policy
        parts = Parts(html)
        for kind, texts in parts.found.items():
            digest = base64.b64encode(hashlib.sha256("".join(texts).encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert not parts.inline and all(one.startswith(("#", "data:")) for one in parts.addresses)
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
        again = await client.get("/", headers={"If-None-Match": answer.headers["ETag"]})
        assert again.status == 304 and not await again.read()
        for path in ("/v1/tree", "/v1/runs"):
            assert (await client.get(path)).status == 401
        assert (await client.post("/v1/schema/check", json={"schema": "true"})).status == 401


async def test_every_route_of_the_page_is_described() -> None:
    async with served(Stand()) as client:
        assert client.app is not None
        known = {r.resource.canonical for r in client.app.router.routes() if r.resource is not None}
        assert set(describe()) <= known


# ---- in a browser

SAID = "document.querySelectorAll('.message.assistant .said')"
DONE = "!document.querySelector('.runs-on') && !document.getElementById('send').hidden"


@seen
@pytest.mark.slow
async def test_send_stream_stop_and_a_second_turn_that_hits(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    client = Steered(local_client, held=True, says="so far")
    async with sat(client) as person:
        await person.sees("document.getElementById('model').textContent !== ''")
        await person.says("first question, long enough to be seen")
        await person.sees(f"{SAID}.length === 1 && {SAID}[0].textContent === 'so far'")  # while it is not done
        assert await person.page.run(
            "!document.getElementById('stop').hidden && document.getElementById('send').hidden"
        )
        await person.click("#stop")
        await person.sees("document.querySelector('.note')?.textContent === 'stopped'")
        async with asyncio.timeout(20):
            await client.ended.wait()  # and the engine has nothing to do for it
        client.go.set()
        await person.page.run("document.querySelector('.message.assistant .meta button').click()")  # again
        await person.sees(f"{DONE} && document.querySelector('.cached')")
        await person.says("second")
        await person.sees(f"{DONE} && document.querySelectorAll('.cached').length === 2")
        found, asked = map(int, re.findall(r"\d+", (await person.text(".message:last-child .cached")))[:2])
        assert 0 < found < asked
        await person.sees("document.querySelectorAll('#tree .node').length > 1")
        assert "first question" in await person.text("#tree .text")
        assert await person.page.run("document.querySelectorAll('#map div').length === rows.size")
        hit = await person.text("#f-hit")
        assert re.fullmatch(r"\d+\.\d %", hit) and hit != "0.0 %"


@seen
@pytest.mark.slow
async def test_a_running_request_is_shown_where_it_stands(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    params = SamplingParams(max_tokens=450, ignore_eos=True)
    async with sat(local_client) as person:
        for turn in range(20):  # until one was seen: how long the engine takes is its own affair
            async with aclosing(
                local_client.stream("somebody asks", params, request_id=f"somebody-{turn}", cache_salt=str(turn))
            ) as items:
                await anext(items)
                await person.page.run("poll()")
                await person.sees("past[past.length - 1].running >= 0")
                if await person.page.run("Boolean(document.querySelector('.node.use .chip'))"):
                    break
        else:
            pytest.fail("no request was seen in the tree")
        await person.sees("!document.querySelector('.chip')")


@seen
@pytest.mark.slow
async def test_what_is_hostile_is_text(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    async with sat(Steered(local_client, says=HOSTILE)) as person:
        await person.page.run(f"document.getElementById('system').value = {json.dumps(HOSTILE)}")
        await person.says(HOSTILE)
        await person.sees(f"{DONE} && {SAID}.length === 1 && rows.size > 0")
        shown = HOSTILE.replace("\u202e", "·")
        assert await person.text(".message.user .said") == shown
        assert shown in await person.text(".message.assistant .said")
        await person.sees("document.querySelector('#tree').textContent.includes('onerror')")
        assert await person.page.run("document.title") == "radixrt"
        assert (
            await person.page.run("document.querySelectorAll('#messages img, #messages b, #tree img, #map img').length")
            == 0
        )
        program = {**GRAPH, "name": HOSTILE, "nodes": [{**node, **({"name": HOSTILE} if "name" in node else {})} for node in GRAPH["nodes"]]}  # fmt: skip
        await person.page.run(f"ask('/v1/programs', {json.dumps(program)}).then(() => view('runs'))")
        await person.sees("document.querySelector('#run g')")
        assert shown in await person.text("#runs b")
        assert await person.page.run("document.querySelectorAll('#runs-pane img').length") == 0
        assert await person.page.run("document.title") == "radixrt"


@seen
@pytest.mark.slow
async def test_the_schema_box_judges_while_one_writes(local_client: LocalClient) -> None:
    async with sat(local_client) as person:
        await person.click("#open-schema")
        assert await person.focus() == "schema"
        await person.write('{"type": ')
        await person.sees("document.getElementById('schema-says').textContent.includes('not JSON')")
        await person.says("an answer")
        await person.sees("document.getElementById('schema').getAttribute('aria-invalid') === 'true'")
        assert await person.page.run("talk.length") == 0  # and nothing is lost
        assert await person.page.run("document.getElementById('say').value") == "an answer"
        await person.page.run("document.getElementById('schema').focus()")
        await person.write('"array", "$ref": "https://example.org/x"}')
        await person.sees("document.getElementById('schema-says').classList.contains('bad') && /ref/.test(document.getElementById('schema-says').textContent)")  # fmt: skip
        await person.click("#schema-clear")
        await person.write('{"enum": ["yes", "no"]}')
        await person.sees("document.getElementById('schema-says').classList.contains('good')")
        await person.page.run("document.getElementById('say').focus()")
        await person.press("Enter")
        await person.sees(f"{DONE} && {SAID}.length === 1")
        assert json.loads(await person.text(".message.assistant .said")) in ("yes", "no")


@seen
@pytest.mark.slow
async def test_an_error_is_shown_as_one_and_regenerate_and_edit_ask_again(local_client: LocalClient) -> None:
    async with sat(local_client) as person:
        await person.page.run("document.getElementById('max_tokens').value = 100000")
        await person.says("too much")
        await person.sees("document.querySelector('.message .error')")
        assert "100000" in await person.text(".message [role=alert]")
        await person.page.run("document.getElementById('max_tokens').value = 5")
        await person.click(".message.assistant .meta button")  # try again
        await person.sees(f"{DONE} && {SAID}.length === 1 && !document.querySelector('.message .error')")
        first = await person.page.run("talk[1].asked")
        await person.click(".message.assistant .meta button")  # regenerate
        await person.sees(f"{DONE} && talk.length === 2 && talk[1].asked !== {first} && talk[1].usage")
        await person.says("and more")
        await person.sees(f"{DONE} && talk.length === 4 && talk[3].usage")
        await person.click(".message.user .meta button")  # edit the first one
        await person.sees("document.activeElement.matches('.edits textarea')")
        await person.write(" indeed")
        await person.press("Enter")
        await person.sees(f"{DONE} && talk.length === 2 && talk[1].usage")
        assert await person.text(".message.user .said") == "too much indeed"


@seen
@pytest.mark.slow
async def test_an_engine_that_fails_is_told_to_the_person() -> None:
    stand = Stand()
    stand.error = RuntimeError("broken")
    async with sat(stand) as person:
        await person.sees("document.getElementById('health').classList.contains('bad')")


@seen
@pytest.mark.slow
async def test_the_key_is_asked_for_on_the_page(local_client: LocalClient) -> None:
    async with sat(local_client, api_key=KEY) as person:
        await person.sees("document.getElementById('ask-key').open")
        assert await person.focus() == "key-value"
        await person.write("wrong")
        await person.press("Enter")
        await person.sees("document.getElementById('ask-key').open && document.getElementById('key-says').textContent !== ''")  # fmt: skip
        await person.page.run("document.getElementById('key-value').focus()")
        await person.write(KEY)
        await person.press("Enter")
        await person.sees("document.getElementById('health').classList.contains('good')")
        assert await person.page.run(
            "sessionStorage.length === 1 && !JSON.stringify(localStorage).includes('key-that')"
        )
        await person.says("hello")
        await person.sees(f"{DONE} && {SAID}.length === 1")


@seen
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_on_a_phone(local_client: LocalClient, dark: bool) -> None:
    fits = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
    async with sat(local_client, width=390, dark=dark) as person:
        await person.says("a question with" + "averylongword" * 8)
        await person.sees(f"{DONE} && {SAID}.length === 1")
        for shown, hidden in (("tree-pane", "chat"), ("runs-pane", "tree-pane"), ("chat", "runs-pane")):
            name = shown.removesuffix("-pane")
            await person.click(f"#tab-{name}")
            await person.sees(f"document.getElementById('{shown}').offsetParent && !document.getElementById('{hidden}').offsetParent")  # fmt: skip
            if name == "tree":
                await person.sees("rows.size > 0")
            assert await person.page.run(fits), name
        for box in ("system", "sampling", "schema"):
            await person.click(f"#open-{box}")
            assert await person.page.run(fits), box
        body = await person.page.run("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", body)[:3])) < 60) == dark


@seen
@pytest.mark.slow
async def test_the_keyboard_is_enough(local_client: LocalClient) -> None:
    await local_client.flush_cache()
    for text in ("the same: one", "the same: two"):
        await say(local_client, text)
    async with sat(local_client) as person:
        await person.sees("rows.size > 2")
        await person.press("Tab")
        assert await person.focus() == "skip"
        await person.press("Enter")
        await person.press("Tab")
        reached = [await person.focus()]
        for _ in range(40):
            await person.press("Tab")
            reached.append(await person.focus())
            if reached[-1].startswith("node"):
                break
        assert reached[-1].startswith("node") and "tab-tree" in reached, reached
        first = await person.page.run("document.activeElement.dataset.id")
        await person.press("ArrowDown")
        assert await person.page.run("document.activeElement.dataset.id") != first
        await person.press("Home", "Enter")
        await person.sees("document.querySelector('.whole')")
        await person.press("ArrowLeft")
        await person.sees("rows.size === 1 && document.activeElement.getAttribute('aria-expanded') === 'false'")
        await person.press("ArrowRight")
        await person.sees("rows.size > 2")
        await person.page.run("document.getElementById('tab-tree').focus()")
        await person.press("ArrowRight")
        await person.sees("document.getElementById('tab-runs').getAttribute('aria-selected') === 'true' && document.getElementById('runs-pane').offsetParent")  # fmt: skip
        await person.press("Tab", "Enter")  # run an example
        await person.sees("document.querySelectorAll('#run g[tabindex]').length > 4")
        await person.page.run("document.querySelector('#run g[tabindex]').focus()")
        await person.press("Enter")
        await person.sees("document.querySelector('.detail')")
        visible = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        await person.page.run("document.getElementById('open-schema').focus()")
        assert await person.page.run(visible)
        await person.press("Enter")
        assert await person.focus() == "schema"
        await person.press("Tab")
        assert await person.focus() in ("welcome", "log", "BUTTON", "say") or await person.page.run(visible)


async def test_who_closes_the_page_leaves_nothing_behind(local_client: LocalClient) -> None:
    client = Steered(local_client, held=True)
    async with reachable(client) as address, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 50}
        async with session.post(address + "/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
        async with asyncio.timeout(20):
            await client.ended.wait()
        client.go.set()
        await until(lambda: client.ended.is_set())


async def test_a_check_that_nobody_waits_for_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that ask and go could otherwise have any number of them run at once."""
    go, begun = threading.Event(), list[str]()

    def problem(text: str) -> None:
        begun.append(text)
        assert go.wait(20)

    monkeypatch.setattr(page, "_problem", problem)
    stand: Any = Stand()
    made = page.Page(Gate(stand, ServerConfig(), Metrics(stand, None)), ServerConfig())

    async def check(text: str) -> Any:
        return await made.check(asked(json.dumps({"schema": text})))

    try:
        first = asyncio.ensure_future(check("1"))
        await until(lambda: begun == ["1"])
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(check("2"))
        await asyncio.sleep(0.05)
        assert begun == ["1"] and not second.done()
    finally:
        go.set()
    assert (await second).status == 200 and begun == ["1", "2"]


def asked(text: str) -> web.Request:
    """A request to check a schema."""
    content = StreamReader(BaseProtocol(asyncio.get_running_loop()), 2**16)
    content.feed_data(text.encode())
    content.feed_eof()
    headers = {"Content-Type": "application/json"}
    return make_mocked_request("POST", "/v1/schema/check", headers=headers, payload=content)
