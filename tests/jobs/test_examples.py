"""The documents of examples/extract: made as they say, gold that is right, and the commands of their README run as they stand."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from radixrt.cli import main
from radixrt.jobs.documents import read_documents
from radixrt.jobs.gold import Gold

HERE = Path(__file__).parent.parent.parent / "examples" / "extract"
MODELS = {"invoices": "CheckedInvoice", "tickets": "Ticket", "papers": "Paper"}
INPUTS = {"invoices": "invoices.jsonl", "tickets": "tickets.csv", "papers": "papers"}


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_extract_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # pydantic looks annotations up there
    spec.loader.exec_module(made)
    return made


make, models = module("make_documents"), module("models")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kind", MODELS)
def test_the_files_are_those_that_the_script_makes(kind: str, tmp_path: Path) -> None:
    where, gold = make.write(kind, 8, 1, tmp_path)
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    there = sorted(file for file in (HERE / where.name).rglob("*")) if kind == "papers" else [HERE / where.name]
    assert [file.name for file in files] == sorted([*(file.name for file in there), gold.name])
    for file in files:
        assert file.read_bytes() == (HERE / file.relative_to(tmp_path)).read_bytes()


@pytest.mark.parametrize("kind", MODELS)
def test_the_gold_rows_are_of_the_documents_and_valid(kind: str) -> None:
    found = list(read_documents(str(HERE / INPUTS[kind])))
    gold = rows(HERE / f"{kind}.gold.jsonl")
    assert [document.id for document in found] == [row["id"] for row in gold]
    assert not any(document.problem for document in found)
    made = make.made(kind, 8, 1)
    assert [document.text for document in found] == [text for _, text, _ in made]
    schema = getattr(models, MODELS[kind]).model_json_schema()
    for row in gold:
        jsonschema.validate(row["value"], schema, format_checker=jsonschema.FormatChecker())
    score = Gold(str(HERE / f"{kind}.gold.jsonl")).score(gold)
    assert score.right == score.documents == 8


@pytest.mark.parametrize("kind", MODELS)
def test_many_are_distinct_valid_and_say_what_their_rows_say(kind: str) -> None:
    made = make.made(kind, 2_000, 7)
    assert len({text for _, text, _ in made}) == len({name for name, _, _ in made}) == 2_000
    model = getattr(models, MODELS[kind])
    verbatim = {
        "invoices": ("number", "vendor", "customer", "currency", "purchase_order"),
        "tickets": ("customer", "product", "version", "order"),
        "papers": ("title", "venue", "doi"),
    }[kind]
    for _, text, row in made:
        model.model_validate_json(json.dumps(row))  # invoices add up
        for name in verbatim:
            assert row[name] is None or row[name] in text, (name, text)
        inner = [
            *(item["description"] for item in row.get("items", ())),
            *(one["name"] for one in row.get("authors", ())),
        ]
        for part in (*inner, *row.get("keywords", ())):
            assert part in text
    assert make.made(kind, 3, 7) == made[:3]  # whatever the count


def test_invoices_vary() -> None:
    made = [row for _, _, row in make.made("invoices", 2_000, 7)]
    assert len({row["number"] for row in made}) == 2_000
    assert {len(row["items"]) for row in made} == set(range(7))
    assert {row["currency"] for row in made} == {"EUR", "USD", "GBP", "CHF", "SEK", "JPY"}
    assert len({row["vendor"] for row in made}) > 1_000
    for name in ("due", "tax_rate", "purchase_order"):
        assert 0.05 < sum(row[name] is None for row in made) / 2_000 < 0.7


def test_an_invoice_that_does_not_add_up() -> None:
    value = rows(HERE / "invoices.gold.jsonl")[1]["value"]
    assert value["items"]
    models.Invoice.model_validate({**value, "total": value["total"] + 1})
    with pytest.raises(ValidationError, match=r"total is [\d.]+, but the items and the tax are [\d.]+ together"):
        models.CheckedInvoice.model_validate({**value, "total": value["total"] + 1})
    with pytest.raises(ValidationError, match="before the date of the invoice"):
        models.CheckedInvoice.model_validate({**value, "due": "1999-01-01"})


COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", (HERE / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("radixrt ")])
def test_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "extract"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(folder)
    for name in ("models", "make_documents"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    arguments = shlex.split(command)[1:]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    if "--dry-run" in arguments:
        assert "first 3 rows:" in out and "time: about " in out
        return
    kind = next(kind for kind, name in INPUTS.items() if name == arguments[1])
    assert "8 rows, 0 failed" in err
    assert "of 8 gold rows right in every field" in out + err
    if (folder / "report.html").exists():
        assert "Documents per second" in (folder / "report.html").read_text("utf-8")
    if "--output" not in arguments or "rows.jsonl" in arguments:
        text = (folder / "rows.jsonl").read_text("utf-8") if "--output" in arguments else out
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        schema = getattr(models, MODELS[kind]).model_json_schema()
        assert len(found) == 8
        for row in found:
            jsonschema.validate(row["value"], schema)
            assert ("confidence" in row) == ("--confidence" in arguments)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python ")])
def test_script(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, script, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(HERE / script), run_name="__main__")
    assert (
        len(rows(tmp_path / "more" / "invoices.jsonl")) == len(rows(tmp_path / "more" / "invoices.gold.jsonl")) == 2_000
    )


def test_every_command_of_the_readme_is_run() -> None:
    assert len(COMMANDS) >= 5
    assert all(line.startswith(("radixrt ", "python ")) for line in COMMANDS)
