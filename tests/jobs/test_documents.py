"""Documents of every kind of source: what is read, in which order, under which id, and what is wrong with the rest."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.jobs.documents import Document, given_documents, read_documents
from radixrt.jobs.html_text import html_to_text


def written(folder: Path, name: str, content: bytes | str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(*args: Any, **settings: Any) -> list[tuple[str, str, str]]:
    documents = list(read_documents(*args, **settings))
    assert [document.index for document in documents] == list(range(len(documents)))
    assert all(bool(document.problem) != bool(document.text) for document in documents)
    return [(document.id, document.text, document.problem) for document in documents]


def refused(*args: Any, **settings: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        list(read_documents(*args, **settings))
    return str(caught.value)


# ---- JSONL


def test_jsonl_has_a_document_for_each_line_that_is_not_blank(tmp_path: Path) -> None:
    path = written(
        tmp_path, "a.jsonl", '\ufeff{"id": "x", "text": "one"}\r\n\n{"id": 7, "text": "two"}\n{"text": " three"}'
    )
    assert read(path) == [("x", "one", ""), ("7", "two", ""), ("line-4", " three", "")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": ""}', "is empty"),
        (b'{"text": " \\n\\t"}', "is empty"),
        (b'{"text": null}', "has no text (null)"),
        (b'{"text": 5}', "has 5 where its text should be"),
        (b'{"text": ["a"]}', "has ['a'] where its text should be"),
        (b'{"txt": "a"}', "has no column 'text'; it has 'txt'"),
        (b'{"text": "a\\u0000b"}', "is binary: it has a zero byte at character 1"),
        (b'{"text": "a\\ud800"}', "is not Unicode text: lone surrogate U+D800 at character 1"),
        (b'{"text": "caf\xe9"}', "is not UTF-8: byte 0xe9 at offset 39"),
        (b'{"text": "a", "text": "b"}', "is not JSON: the key 'text' stands twice in one object"),
        (b'{"text": "a"', "is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b"[" * 100_000, "is not JSON that can be read: nested too deeply"),
        (b'"text"', "must be a JSON object, not 'text'"),
        (b"\x00\xff\xfe", "is not UTF-8: byte 0xff at offset 27"),
        (b'{"text": "' + b"a" * 200_000 + b'"}', "is longer than 150,000 bytes"),
        (b'{"text": "a", "id": "first"}', "has the id 'first' of an earlier document"),
        (b'{"text": "a", "id": ""}', "has an empty id"),
        (b'{"text": "a", "id": 1.5}', "has the id 1.5, which is neither"),
        (b'{"text": "a", "id": true}', "has the id True, which is neither"),
        (b'{"text": "a", "id": "\\ud800"}', "has an id that is not Unicode text"),
        (b'{"text": "a", "id": "' + b"x" * 2000 + b'"}', "has an id of 2,000 characters"),
        (b'{"text": "a", "id": ' + b"9" * 40 + b"}", "neither a string nor an integer of 64 bits"),
    ],
    ids=range(23),
)
@pytest.mark.parametrize("end", [b"\n", b"\n\n"])
def test_a_bad_line_is_a_document_with_a_problem_and_the_others_are_read(
    tmp_path: Path, line: bytes, problem: str, end: bytes
) -> None:
    first, last = b'{"id":"first","text":"1"}\n', b'{"id":"last","text":"2"}'
    found = read(written(tmp_path, "a.jsonl", first + line + end + last), max_bytes=150_000)
    assert [text for _, text, _ in found] == ["1", "", "2"]
    assert [name for name, _, _ in found][::2] == ["first", "last"]
    assert found[1][0] == ("first" if "earlier" in problem else "line-2")
    assert found[1][2].startswith(problem) or (problem.startswith("neither") and problem in found[1][2])


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_of_just_the_limit_is_taken(tmp_path: Path, more: int, end: bytes) -> None:
    line = b'{"text": "' + b"a" * (88 + more) + b'"}'
    found = read(written(tmp_path, "a.jsonl", line + end), max_bytes=100)
    assert [(bool(text), problem) for _, text, problem in found] == (
        [(False, "is longer than 100 bytes")] if more > 0 else [(True, "")]
    )


@pytest.mark.parametrize(
    ("record", "field", "text"),
    [
        ({"id": "1", "text": "a", "body": "b"}, None, "a"),
        ({"id": "1", "body": "b", "n": 5}, None, "b"),
        ({"id": "1", "text": "a", "body": "b"}, "body", "b"),
    ],
)
def test_the_column_of_the_text(tmp_path: Path, record: dict[str, Any], field: str | None, text: str) -> None:
    path = written(tmp_path, "a.jsonl", json.dumps(record))
    assert read(path, field=field) == [("1", text, "")]
    assert [document.text for document in given_documents([record], field=field)] == [text]


@pytest.mark.parametrize(
    ("records", "field", "problem"),
    [
        ([{"a": "x", "b": "y"}], None, "field: none is given, and the columns are 'a', 'b'; name one"),
        ([{"n": 5}], None, "field: no column holds text; the columns are 'n'"),
        ([{"text": "x"}] * 3, "txt", "field='txt': no such column; the columns are 'text'; did you mean 'text'?"),
        ([{"text": "x"}] * 200, "body", "field='body': no such column; the columns are 'text'"),
    ],
)
def test_a_column_that_no_record_has_is_an_error_of_the_source(
    tmp_path: Path, records: list[dict[str, Any]], field: str | None, problem: str
) -> None:
    path = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, records)))
    assert refused(path, field=field) == problem
    with pytest.raises(InvalidRequest):
        list(given_documents(records, field=field))


def test_records_without_the_column_wait_for_one_that_has_it(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"id":"a"}\n[1]\n{"id":"c","body":"x"}\n{"id":"d"}')
    found = read(path, field="body")
    assert [(name, text, problem[:11]) for name, text, problem in found] == [
        ("a", "", "has no colu"),
        ("line-2", "", "must be a J"),
        ("c", "x", ""),
        ("d", "", "has no colu"),
    ]


def test_the_column_of_the_id(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text":"a","key":"k1","id":"i"}\n{"text":"b"}\n{"text":"c","key":null}')
    assert [(name, problem) for name, _, problem in read(path, id_field="key")] == [
        ("k1", ""),
        ("line-2", "has no id in the column 'key'"),
        ("line-3", "has no id in the column 'key'"),
    ]


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=20).filter(lambda text: text.strip("\0") and text.strip())), unique=True
    )
)
def test_jsonl_round_trip(texts: list[tuple[str]]) -> None:
    lines = "\n".join(
        json.dumps({"text": text.replace("\0", "0")}, ensure_ascii=i % 2 == 0) for i, (text,) in enumerate(texts)
    )
    found = piped(lines.encode())
    assert [document.text for document in found] == [text.replace("\0", "0") for (text,) in texts]


# ---- standard input


class Stdin(io.TextIOWrapper):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))


def piped(content: bytes, **settings: Any) -> list[Document]:
    before, sys.stdin = sys.stdin, Stdin(content)
    try:
        return list(read_documents("-", **settings))
    finally:
        sys.stdin = before


@pytest.mark.parametrize(
    ("content", "settings", "documents"),
    [
        (b'\n {"text": "a"}\n{"text": "b"}', {}, [("line-2", "a"), ("line-3", "b")]),
        (b'\xef\xbb\xbf{"id": 3, "text": "a"}', {}, [("3", "a")]),
        (b"one\n\n two \r\n{three", {}, [("line-1", "one"), ("line-3", " two "), ("line-4", "{three")]),
        (b"", {}, []),
        (b"id,text\n1,a", {"format": "csv"}, [("1", "a")]),
        (b"a\nb", {"format": "text"}, [("document", "a\nb")]),
        (b"<p>a<p>b", {"format": "html"}, [("document", "a\n\nb")]),
        (b'{"text": "a"}', {"format": "lines"}, [("line-1", '{"text": "a"}')]),
    ],
)
def test_standard_input(content: bytes, settings: dict[str, str], documents: list[tuple[str, str]]) -> None:
    assert [(document.id, document.text) for document in piped(content, **settings)] == documents


def test_a_pipe_is_read_as_standard_input_is(tmp_path: Path) -> None:
    out, into = os.pipe()
    os.write(into, b"one\ntwo\n")
    os.close(into)
    try:
        assert [text for _, text, _ in read(f"/dev/fd/{out}")] == ["one", "two"]
    finally:
        os.close(out)


# ---- CSV


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=12)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=8), st.sampled_from([",", ";", "\t"]))
def test_csv_is_read_as_it_was_written(rows: list[tuple[str, str]], delimiter: str) -> None:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(["note", "text"])
    writer.writerows(rows)
    found = piped(file.getvalue().encode(), format="csv")
    assert [document.id for document in found] == [f"row-{i}" for i in range(1, len(rows) + 1)]
    assert [document.text for document in found] == [text if text.strip() else "" for _, text in rows]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"5", "has 1 cells, and the header 2"),
        (b"5,a,b", "has 3 cells, and the header 2"),
        (b"5,", "is empty"),
        (b"5,caf\xe9", "is not UTF-8: byte 0xe9 at offset 19"),
        (b'5,"a\nb\ncaf\xe9"', "is not UTF-8: byte 0xe9 at offset 24"),
        (b'5,"a"b', "is not CSV: ',' expected after '\"'"),
        (b'5,"a"b,"c\nd,e\nf",g', "is not CSV: ',' expected after '\"'"),
        (b"5,a\0b", "is binary: it has a zero byte at character 1"),
        (b"1,again", "has the id '1' of an earlier document"),
        (b",a", "has an empty id"),
        (b'5,"' + b"a" * 2000 + b'"', "is longer than 1,000 bytes"),
        (b'5,"x\n' + b"a" * 2000 + b'\ny,z\n"', "is longer than 1,000 bytes"),
        (b'5,"' + b"aa\n" * 600 + b'"', "is longer than 1,000 bytes"),
        (b'5,"' + b"aa\n" * 6000 + b'"', "is longer than 1,000 bytes"),
    ],
    ids=range(14),
)
def test_a_bad_row_is_a_document_with_a_problem_and_the_others_are_read(
    tmp_path: Path, row: bytes, problem: str
) -> None:
    path = written(tmp_path, "a.csv", b"id,text\n1,one\n" + row + b"\n2,two\n\n3,three")
    found = read(path, max_bytes=1000)
    assert [text for _, text, _ in found] == ["one", "", "two", "three"]
    assert [name for name, _, _ in found][2:] == ["2", "3"]
    assert found[1][2] == problem
    assert found[1][0] == ("5" if problem.startswith(("is empty", "is not UTF-8", "is binary")) else found[1][0])


def test_a_quote_that_is_never_closed_says_so(tmp_path: Path) -> None:
    found = read(written(tmp_path, "a.csv", 'id,text\n1,one\n2,"two\n3,three\n'))
    assert found[0] == ("1", "one", "")
    assert found[1:] == [("row-2", "", "is not CSV: a quoted field is never closed")]


@pytest.mark.parametrize(
    ("content", "settings", "problem"),
    [
        ("", {}, "is empty; its first line must name the columns"),
        ("a,b\n1,2", {}, "field: none is given, and the columns are 'a', 'b'; name one"),
        ("text,b\n1,2", {"field": "txt"}, "field='txt': no such column; the columns are 'text', 'b'; did you mean"),
        ("text,b\n1,2", {"id_field": "key"}, "id_field='key': no such column; the columns are 'text', 'b'"),
        ("text,text\n1,2", {}, "has 2 columns named 'text'"),
        (b"\xff\xfea\x00", {}, "the line of the column names is not UTF-8: byte 0xff at offset 0"),
        ('"a\n', {}, "the line of the column names is not CSV: a quoted field is never closed"),
    ],
)
def test_a_table_without_its_columns_is_refused(
    tmp_path: Path, content: bytes | str, settings: dict[str, str], problem: str
) -> None:
    assert problem in refused(written(tmp_path, "a.csv", content), **settings)


def test_tsv_and_the_only_column(tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.tsv", 'id\tbody\n1\ta, "b"\n'), max_bytes=99) == [("1", 'a, "b"', "")]


# ---- parquet


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(written(tmp_path, "a.parquet", b"PAR1")).endswith(
        "parquet needs pyarrow: pip install radixrt[parquet]"
    )


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = str(tmp_path / "a.parquet")
    columns = {
        "id": [f"d{i}" for i in range(100)],
        "n": list(range(100)),
        "body": ["x" * i for i in range(99)] + [None],
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=30)
    found = read(path, max_bytes=50)
    assert [name for name, _, _ in found] == columns["id"]
    assert [text for _, text, _ in found[1:51]] == columns["body"][1:51]
    assert {problem for _, _, problem in found[51:99]} == {"is longer than 50 bytes"}
    assert (found[0][2], found[99][2]) == ("is empty", "has no text (null)")
    assert [name for name, _, _ in read(path, id_field="n")] == [str(i) for i in range(100)]
    assert "no such column; the columns are 'id', 'n', 'body'" in refused(path, field="txt")
    assert "no such column" in refused(path, id_field="txt")
    assert "is no parquet file" in refused(written(tmp_path, "b.parquet", b"PAR1"))


# ---- files and folders


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    contents: dict[str, bytes | str] = {
        "b.md": "# B",
        "a/z.txt": "z",
        "a/b/c.html": "<p>c</p>",
        "a.txt": "\ufeffa\r\n",
        ".hidden": "h",
        ".git/x.txt": "h",
        "a/.y.txt": "h",
        "picture.png": b"\x89PNG\r\n\x1a\n\x00",
        "latin.txt": b"caf\xe9",
        "utf16.txt": "a".encode("utf-16"),
        "empty.txt": "",
        "big.txt": "x" * 2000,
        "rows.csv": "a,b",
        "page.html": "<script>1</script>",
        "é.txt": "e",
    }
    for name, content in contents.items():
        written(tmp_path, name, content)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path, max_bytes=1000) == [
        ("a/b/c.html", "c", ""),
        ("a/z.txt", "z", ""),
        ("a.txt", "a\r\n", ""),
        ("b.md", "# B", ""),
        ("big.txt", "", "is longer than 1,000 bytes"),
        ("empty.txt", "", "is empty"),
        ("gone", "", "cannot be read: No such file or directory"),
        ("latin.txt", "", "is not UTF-8: byte 0xe9 at offset 3"),
        ("loop", "", "is not a regular file"),
        ("page.html", "", "is empty: the page has no text"),
        ("picture.png", "", "is binary: it has a zero byte at offset 8"),
        ("pipe", "", "is not a regular file"),
        ("rows.csv", "", "is a table (csv): give it as an input of its own"),
        ("utf16.txt", "", "is binary: it has a zero byte at offset 3"),
        ("é.txt", "e", ""),
    ]


def test_a_name_that_is_not_utf_8_has_an_id_that_is(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))).write_text("x")
    assert read(tmp_path) == [("caf\\xe9.txt", "x", "")]


@pytest.mark.parametrize(("name", "text"), [("n.md", "# a"), ("n.html", "a"), ("n.log", "# a"), ("n", "# a")])
def test_one_file_is_one_document(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, "<h1>a</h1>" if name.endswith("html") else "# a")
    assert read(path) == [(name, text, "")]
    assert read(Path(path), format="lines") == [("line-1", "<h1>a</h1>" if name.endswith("html") else "# a", "")]


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("nowhere.jsonl", {}, "No such file or directory"),
        ("a\0b", {}, "null byte"),
        ("f.txt", {"format": "jsnl"}, "format='jsnl'; did you mean 'jsonl'?"),
        ("f.txt", {"format": "folder"}, "is a file"),
        ("f.txt", {"field": "text"}, "f.txt' has no columns"),
        ("f.txt", {"format": "lines", "id_field": "id"}, "f.txt' has no columns"),
        ("f.txt", {"max_bytes": 0}, "max_bytes=0: must be at least 1"),
        ("f.json", {}, "what is in a .json file? give format='jsonl'"),
        (".", {"format": "csv"}, "is a folder"),
        (".", {"field": "text"}, "has no columns"),
        ("empty", {}, "there are no files in this folder"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], problem: str
) -> None:
    written(tmp_path, "f.txt", "a")
    written(tmp_path, "f.json", "{}")
    (tmp_path / "empty").mkdir()
    assert problem in refused(f"{tmp_path}/{name}", **settings)


def test_a_line_without_end_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.truncate(200 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"text": "b"}')
    tracemalloc.start()
    try:
        found = read(path, max_bytes=1 << 20)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [("line-1", "", "is longer than 1,048,576 bytes"), ("line-2", "b", "")]
    assert most < 16 << 20


# ---- in memory


def test_documents_of_python_values() -> None:
    assert list(given_documents(["a", ("x", "b"), ""])) == [
        Document(0, "row-1", "a"),
        Document(1, "x", "b"),
        Document(2, "row-3", "", "is empty"),
    ]
    assert list(given_documents([])) == []
    assert list(given_documents([], field="text")) == []
    assert [d.problem for d in given_documents([{"text": "a"}, "b"])] == [
        "",
        "must be a mapping, as the first one is, not 'b'",
    ]
    for wrong in ("text", 5, {"text": "a"}, None):
        with pytest.raises(InvalidRequest, match="source"):
            list(given_documents(wrong))  # type: ignore[arg-type]
    for items in ([5], [None], ["a", ("x", "y", "z")]):
        with pytest.raises(InvalidRequest, match="must be a text or"):
            list(given_documents(items))  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="field: 'a' has no columns"):
        list(given_documents(["a"], field="text"))


def test_documents_are_read_one_at_a_time() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "a"

    documents = given_documents(endless())
    assert [next(documents).id for _ in range(3)] == ["row-1", "row-2", "row-3"]


# ---- HTML


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("plain", "plain"),
        ("<p>One <b>bold</b>word.</p><p>Two</p>", "One boldword.\n\nTwo"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("  a \n\t b  ", "a b"),
        ("a <b> b</b>", "a b"),
        ("<ul><li>a<li>b</ul>c", "a\nb\n\nc"),
        ("<table><tr><th>x</th><th>y</th></tr><tr><td>1<td> 2 </table>", "x\ty\n1\t2"),
        ("<pre>\n  a\n    b\n</pre>c", "a\n    b\n\nc".replace("a", "  a", 1)),
        ("&lt;p&gt; &eacute;&nbsp;&#8364; &nosuch; &", "<p> é € &nosuch; &"),
        ("<title>T</title><style>x</style><body>b<script>if (1<2) '</p>'</script>c", "T\n\nb"[:2] + "\nbc"[1:]),
        ("a<SCRIPT>x</ScRiPt >b", "ab"),
        ("a<!-- b > -- c -->d<!-->e<!---->f<!--x", "adef"),
        ("a<svg><text>b</text></svg>c<svg/>d<template><p>x</p></template>", "acd"),
        ("a <svg>b</noscript>", "a"),
        ("1 < 2 and 3 <4 <", "1 < 2 and 3 <4 <"),
        ("<a title='x>y' href=\"<\">z</a>", "z"),
        ("<p don't>a</p>", "a"),
        ("<!DOCTYPE html><?xml x?>a</>b", "ab"),
        ("a<p", "a"),
        ("a<a b='", "a"),
    ],
)
def test_html(html: str, text: str) -> None:
    assert html_to_text(html) == text


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0", exclude_categories=["Cc"]), max_size=8)
TREES = st.recursive(
    WORDS.map(escape),
    lambda inner: st.tuples(
        st.sampled_from(["p", "b", "div", "td", "pre", "a href='x>y'", "h1"]), st.lists(inner, max_size=4)
    ).map(lambda each: f"<{each[0]}>{''.join(each[1])}</{each[0].split()[0]}>"),
    max_leaves=12,
)


@given(TREES)
def test_the_words_of_a_page_are_those_that_the_standard_parser_finds(html: str) -> None:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            found.append(data)

    reader = Reader()
    reader.feed(html)
    reader.close()
    assert "".join(html_to_text(html).split()) == "".join("".join(found).split())


@pytest.mark.parametrize(
    "piece", ["<", "<!--", "<a ", "<script>", "&", "b='", "<![CDATA[", "<?", "</", "<svg>", "<p>a", "<!-", "--", "<a b"]
)
def test_a_page_of_broken_markup_is_read_once(piece: str) -> None:
    html_to_text(piece * 200_000)  # a second where it is linear; hours where it is not
