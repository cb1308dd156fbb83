"""Constrained generation on the default model: is every output valid and complete, and what do constraints cost?

python scripts/bench/constraints.py valid [--schemas FILE.jsonl]  random outputs of ten grammars, fifty patterns and the file's schemas
python scripts/bench/constraints.py regexes                       compile and mask times of 60 patterns, random outputs checked
python scripts/bench/constraints.py speed                         an extraction job beside free decoding of as many tokens
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import jsonschema
import lark
import numpy as np

from radixrt import Constraint, Engine, InvalidRequest, SamplingParams, load_tokenizer
from radixrt.bench.machine import machine, watch

PATTERNS = (
    r"\d{3}-\d{4}", r"\d+(\.\d+)?", r"(foo|foobar)", r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", r"[A-Z][a-z]{2,9}",
    r"(yes|no|maybe)", r"[a-f0-9]{8}", r"\+?\d{2,3} \d{6,8}", r"([a-z]+, ){2}[a-z]+", r"#[0-9a-fA-F]{6}",
    r"[^@ \n]{1,8}@[a-z]{1,8}\.(com|org)", r"(\(\d+\)|\[\d+\])+", r"(a|b)*abb", r"(?!admin)[a-z]{3,10}", r"\w{1,12}",
    r"-?(0|[1-9]\d*)", r"v\d+\.\d+\.\d+(-rc\d)?", r"[αβγδ]{2,5}", r"(?:[01]\d|2[0-3]):[0-5]\d", r".{5,30}",
    r"(Mr|Ms|Dr)\. [A-Z][a-z]+", r"\$\d{1,3}(,\d{3})*(\.\d\d)?", r"[A-Z]{2}\d{2}[A-Z0-9]{4}", r"(0|1(01*0)*1)+", r"x{3,}y",
    r"(ab?c?){2,4}", r"\s*true\s*", r"(?i)hello( world)?", r"[\u4e00-\u4e2d]{1,3}", r"[01]{8}( [01]{8}){0,2}",
    r"(?=[a-z]*\d)[a-z\d]{4,6}", r"((north|south)-)?(east|west)", r"Q[1-4] 20[0-9]{2}", r"[aeiou]{1,5}[^aeiou\n]{1,5}", r"\d{1,3}%",
    r"(\d{1,3}\.){3}\d{1,3}", r"[A-Z]+(_[A-Z]+)*", r"<(b|i)>[a-z ]{1,20}</(b|i)>", r"//[^\n]{0,20}", r"\"[^\"\\\n]{0,12}\"",
    r"(one|two|three)(, (one|two|three))*", r"[ab]{0,50}", r"(|a|aa|aaa)b", r"\d(?:\d\d)*", r"[a-z]+?z", r"(\w+ ){3}\w+\.",
    r"(?:(?:red|green|blue) ){1,3}end", r"[+-]\d+", r"[^\W\d_]{4}", r"0x[0-9A-F]{1,16}",
)  # fmt: skip
HARD = (
    r"(.|\n){0,500}Answer:", r"(a+)+b", r"(a|a)*c", r"[^\n]{0,2000}", r"(?=.*[A-Z])(?=.*\d).{8,20}", r"((a{0,30}){0,30}){0,30}b",
    r"(x+x+)+y", r"\w+(\s\w+){0,99}", r"(?:(?:a|b|c|d|e){20}){5}", r"(a|b)\1",
)  # fmt: skip
# name -> syntax, text, and the parser that judges (None: the lark package, with the same text)
GRAMMARS: dict[str, tuple[Literal["lark", "gbnf", "ebnf"], str, Callable[[str], object] | None]] = {
    "a calculation": (
        "lark",
        r"""
        ?start: sum
        ?sum: product | sum "+" product -> add | sum "-" product -> sub
        ?product: atom | product "*" atom -> mul | product "/" atom -> div
        ?atom: NUMBER -> number | "-" atom -> neg | NAME -> var | "(" sum ")"
        %import common.CNAME -> NAME
        %import common.NUMBER
        %import common.WS_INLINE
        %ignore WS_INLINE
        """,
        None,
    ),
    "a query": (
        "lark",
        r"""
        start: "SELECT " columns " FROM " NAME (" WHERE " condition)? (" ORDER BY " NAME (" ASC" | " DESC")?)? (" LIMIT " INT)? ";"
        columns: "*" | column (", " column)*
        column: NAME | ("COUNT" | "SUM" | "AVG") "(" NAME ")"
        condition: test | condition " AND " test | condition " OR " test
        test: NAME COMPARED value | "NOT (" condition ")"
        value: INT | /'[^'\n]{0,20}'/ | "NULL"
        COMPARED: " = " | " <> " | " < " | " > "
        NAME: /[a-z_]{1,12}/
        %import common.INT
        """,
        None,
    ),
    "a program": (
        "lark",
        r"""
        start: statement+
        statement: NAME " = " value ";\n" | "while (" value ") " block | "if (" value ") " block (" else " block)? | "print(" value ");\n"
        block: "{\n" statement* "}\n"
        ?value: term | value (" + " | " - " | " == " | " < ") term
        ?term: NAME | INT | ESCAPED_STRING | "(" value ")"
        NAME: /(?!while|if|else|print)[a-z][a-z0-9_]{0,9}/
        %import common (INT, ESCAPED_STRING)
        """,
        None,
    ),
    "a letter": (
        "lark",
        r"""
        start: "Dear " PERSON ",\n\n" sentence~1..4 "\n\n" ("Yours sincerely" | "Kind regards"i) ",\n" PERSON
        sentence: WORD (" " WORD | ", " WORD)~2..6 END
        END: /[.!?] ?/
        PERSON: ("Mr " | "Ms " | "Dr ")? UPPER LOWER~2..9
        WORD: (UPPER | LOWER) LOWER~0..7
        UPPER: "A".."Z" | "É"
        LOWER: "a".."z" | "é" | "ü"
        """,
        None,
    ),
    "a list in Lisp": (
        "lark",
        r"""
        start: list
        list: "(" [item (_SPACE item)*] ")"
        ?item: SYMBOL | SIGNED_NUMBER | ESCAPED_STRING | list | "'" item | COMMENT item
        SYMBOL: /[a-zA-Z*\/<>=?!][a-zA-Z0-9*\/<>=?!-]*/
        COMMENT: /;[^\n]*\n/
        _SPACE: /[ \n]+/
        %import common (SIGNED_NUMBER, ESCAPED_STRING)
        """,
        None,
    ),
    "a JSON document": (
        "gbnf",
        r"""
        root ::= ws value ws
        value ::= object | array | string | number | "true" | "false" | "null"
        object ::= "{" ws (pair (ws "," ws pair)*)? ws "}"
        pair ::= string ws ":" ws value
        array ::= "[" ws (value (ws "," ws value)*)? ws "]"
        string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
        number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
        ws ::= [ \t\n]{0,4}
        """,
        json.loads,
    ),
    "an expression in Python": (
        "gbnf",
        r"""
        root ::= either
        either ::= or (" if " or " else " either)?   # the rules below are the precedence of Python's operators
        or ::= and (" or " and)*
        and ::= not (" and " not)*
        not ::= "not "* compared
        compared ::= sum ((" < " | " == " | " != " | " in " | " not in " | " is ") sum)?
        sum ::= product (" " [-+] " " product)*
        product ::= power ((" * " | " / " | " // " | " % ") power)*
        power ::= "-"? trailed ("**" power)?
        trailed ::= number | atom ("." name | "[" either (":" either)? "]" | "(" (either (", " either)*)? ")")*
        atom ::= name | string | "(" either ")" | "[" (either (", " either)*)? "]" | "{" either ": " either "}" | lambda
        lambda ::= "(lambda " name ": " either ")"
        name ::= [a-z]{1,6} "_" [0-9]?
        number ::= ("0" | [1-9] [0-9]{0,5}) "." [0-9]{1,4} | [1-9] [0-9]{0,5} "j"?
        string ::= "'" ([^'\\\x00-\x1F] | "\\n")* "'"
        """,
        lambda text: ast.parse(text, mode="eval"),
    ),
    "an XML document": (
        "gbnf",
        r"""
        root ::= "<?xml version=\"1.0\"?>\n"? element
        element ::= note | list | "<empty" attribute{0,1} "/>"
        note ::= "<note" attribute? ">" content* "</note>"
        list ::= "<list>\n" ("<item>" content* "</item>\n")+ "</list>"
        content ::= text | element | "<!-- " [a-z ]* " -->" | "<![CDATA[" [^\]\x00-\x1F\uFFFE\uFFFF]* "]]>"
        attribute ::= " name=\"" ([^<&"\x00-\x1F\uFFFE\uFFFF] | entity)* "\""
        text ::= ([a-zA-Z0-9 .,;:!?\n] | entity)+
        entity ::= "&" ("amp" | "lt" | "quot" | "#" [4-9] [0-9] | "#x" [A-F] [0-9A-F]) ";"
        """,
        ElementTree.fromstring,
    ),
    "a configuration in TOML": (
        "ebnf",
        r"""
        root ::= 'settings = ' value (#xA '# ' [a-z ]* #xA 'more = ' value)? #xA
        value ::= string | number | boolean | date | array | table
        array ::= '[' (value (', ' value)* ','?)? ']'
        table ::= '{' ('a = ' value (', b = ' value)?)? '}'
        string ::= '"' ([a-zA-Z0-9 .,:é#] | '\\' ('n' | 't' | '"' | '\\' | 'u00' [0-9A-F] [0-9A-F]))* '"' | "'" [a-zA-Z0-9 "]* "'"
        number ::= ('+' | '-')? ('0' | [1-9] ('_'? [0-9]){0,5}) ('.' [0-9]+ ('_' [0-9])?)? (('e' | 'E') '-'? [0-9]+)? | '0x' [0-9a-f]+ | 'inf'
        boolean ::= 'true' | 'false'
        date ::= ('19' | '20') [0-9] [0-9] '-' ('0' [1-9] | '1' [0-2]) '-' ('0' [1-9] | '1' [0-9] | '2' [0-8]) ('T' [0-1] [0-9] ':00:00Z')?
        """,
        tomllib.loads,
    ),
    "a regular expression": (
        "ebnf",
        r"""
        root ::= branch ('|' branch)*
        branch ::= piece*
        piece ::= atom (('*' | '+' | '?' | '{' [1-9] (',' '9'?)? '}') '?'?)?
        atom ::= [a-zA-Z0-9 ,:;=é] | '.' | '\\' [dDsSwW.*+?()] | '[' '^'? ([a-z] | [a-m] '-' [n-z] | '\\d')+ ']'
               | '(' ('?:' | '?=' | '?!')? root ')'  /* no look-behind: its width would have to be fixed */
        """,
        re.compile,
    ),
}
INVOICE = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 40},
        "invoice_number": {"type": "string", "pattern": "^INV-[0-9]{5}$"},
        "date": {"type": "string", "format": "date"},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "total": {"type": "number", "minimum": 0, "maximum": 100000},
        "paid": {"type": "boolean"},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 30},
                    "quantity": {"type": "integer", "minimum": 1},
                },
                "required": ["name", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "invoice_number", "date", "currency", "total", "paid", "items"],
    "additionalProperties": False,
}


Job = tuple[str, SamplingParams, Any]  # a prompt, what is asked for, and what judges the output


def valid(engine: Engine, path: Path | None, count: int, schemas: int, samples: int, seed: int) -> int:
    """Random constraints, temperature 1.0, budgets from the shortest possible to 200; returns how many outputs are wrong."""
    rng = random.Random(seed)
    jobs = [*of_schemas(engine, rng, path, count, schemas)] if path else []
    used = len({prompt for prompt, _, _ in jobs})
    for pattern in PATTERNS:
        constraint = Constraint.regex(pattern)
        least = constraint.compile(engine.tokenizer).min_tokens
        jobs += [("An example: ", budget(rng, constraint, least), re.compile(pattern)) for _ in range(2)]
    for name, (syntax, text, parse) in GRAMMARS.items():
        constraint = Constraint.grammar(text, syntax)
        least = constraint.compile(engine.tokenizer).min_tokens
        parse = parse or lark.Lark(text, parser="earley", lexer="dynamic_complete").parse
        jobs += [(f"Here is {name}:\n", budget(rng, constraint, least), parse) for _ in range(samples)]
    started = time.perf_counter()
    outputs = engine.generate([prompt for prompt, _, _ in jobs], [params for _, params, _ in jobs], progress=True)
    seconds = time.perf_counter() - started
    wrong = 0
    for (_, params, check), output in zip(jobs, outputs):
        problem = output.error or judge(check, output.text)
        if problem:
            wrong += 1
            print(f"WRONG {problem}: max_tokens={params.max_tokens} {output.text!r} {params.constraint!r}"[:600])
    tokens = sum(o.completion_tokens for o in outputs)
    full = sum(o.completion_tokens == params.max_tokens for (_, params, _), o in zip(jobs, outputs))
    print(
        f"{len(jobs)} outputs of {used} schemas, {len(PATTERNS)} patterns and {len(GRAMMARS)} grammars, {wrong} invalid or incomplete; "
        f"{tokens:,} tokens in {seconds:.0f} s, {sum(o.forced_tokens for o in outputs) / max(tokens, 1):.1%} forced; "
        f"{full} used their whole budget"
    )
    return wrong


def of_schemas(engine: Engine, rng: random.Random, path: Path, count: int, schemas: int) -> Iterator[Job]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rng.shuffle(rows)
    used = 0
    for row in rows:
        if used == schemas:
            break
        try:
            constraint = Constraint.json_schema(row["schema"])
            least = constraint.compile(engine.tokenizer).min_tokens
        except InvalidRequest:
            continue
        if least > 200:
            continue
        used += 1
        kind = jsonschema.validators.validator_for(row["schema"], default=jsonschema.Draft202012Validator)
        check = kind(row["schema"], format_checker=kind.FORMAT_CHECKER)
        for _ in range(count // schemas):
            yield f"A JSON document ({row['id']}):\n", budget(rng, constraint, least), check


def budget(rng: random.Random, constraint: Constraint, least: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(least, 200), temperature=1.0, seed=rng.getrandbits(32), constraint=constraint
    )


def judge(check: Any, text: str) -> str | None:
    """What is wrong with an output, if anything."""
    if isinstance(check, re.Pattern):
        return None if check.fullmatch(text) else "no full match"
    if callable(check):
        try:
            check(text)
        except Exception as error:  # each parser has its own
            return f"not parsed ({error})"
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON ({error})"
    return next((f"not valid ({error.message[:100]})" for error in check.iter_errors(value)), None)


def regexes() -> int:
    """Compile each pattern, follow random masks to an end ten times; returns how many patterns were wrong or too slow."""
    tokenizer = load_tokenizer()
    Constraint.regex("warm up").compile(tokenizer)
    rng = random.Random(0)
    mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), dtype=np.int32)
    right, bad = 0, 0
    refused: list[str] = []
    compiles: list[float] = []
    masks: list[float] = []
    for pattern in (*PATTERNS, *HARD):
        start = time.process_time()
        try:
            compiled = Constraint.regex(pattern).compile(tokenizer)
        except InvalidRequest as error:
            refused.append(f"{pattern}: {error}"[:160])
            continue
        finally:
            compiles.append((time.process_time() - start) * 1000)
        wrong, slowest = 0, 0.0
        for _ in range(10):
            matcher, budget, tokens = compiled.matcher(), compiled.min_tokens + rng.randrange(40), list[int]()
            while not matcher.finished and matcher.can_continue and len(tokens) < budget:
                begun = time.process_time_ns()
                matcher.fill_mask_within(mask, 0, budget - len(tokens))
                masks.append((time.process_time_ns() - begun) / 1000)
                slowest = max(slowest, masks[-1])
                allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
                token = int(rng.choice(allowed))
                if not matcher.accept(token):
                    wrong += 1
                    break
                if token not in tokenizer.eos_ids:
                    tokens.append(token)
            text = b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
            wrong += re.fullmatch(pattern, text) is None
        slow = compiles[-1] > 100 or slowest > 2000
        right += not wrong
        if wrong or slow:
            bad += 1
            print(f"{pattern}: {wrong} of 10 wrong, compiled in {compiles[-1]:.1f} ms, slowest mask {slowest:.0f} us")
    for line in refused:
        print(f"refused: {line}")
    print(
        f"{len(compiles)} patterns: {right} right, {len(refused)} refused by name; compile ms median {statistics.median(compiles):.2f}, most "
        f"{max(compiles):.1f}; mask us median {statistics.median(masks):.1f}, mean {statistics.mean(masks):.1f}, most {max(masks):.0f} of {len(masks):,}"
    )
    return bad


def speed(engine: Engine, repeats: int, documents: int) -> int:
    """Extraction of ``documents`` documents, A B A B beside free decoding of as many tokens for each; returns 1 below 1.0x."""
    rng = random.Random(0)
    names = ("Miller", "Okafor", "Tanaka", "Silva", "Novak", "Haddad")
    goods = ("paper", "ink", "chairs", "lamps", "cables")
    head = "Read the invoice and answer with one JSON object.\n\n"
    prompts = [
        f"{head}Invoice INV-{rng.randrange(10**5):05d} of 2026-0{rng.randrange(1, 10)}-1{rng.randrange(10)} to {rng.choice(names)} Ltd: "
        f"{rng.randrange(1, 9)} x {rng.choice(goods)}, total {rng.randrange(10, 999)}.50 EUR, paid.\nJSON: "
        for _ in range(documents)
    ]
    held = SamplingParams(max_tokens=160, temperature=0, constraint=Constraint.json_schema(INVOICE))
    ratios, forced, wrong = [], 0.0, 0
    check = jsonschema.Draft202012Validator(INVOICE)
    for _ in range(repeats):
        engine.flush_cache()
        start = time.perf_counter()
        outputs = engine.generate(prompts, held, progress=False)
        constrained = time.perf_counter() - start
        wrong += sum(judge(check, o.text) is not None for o in outputs)
        forced = sum(o.forced_tokens for o in outputs) / sum(o.completion_tokens for o in outputs)
        free = [SamplingParams(max_tokens=o.completion_tokens, temperature=0, ignore_eos=True) for o in outputs]
        engine.flush_cache()
        start = time.perf_counter()
        engine.generate(prompts, free, progress=False)
        unconstrained = time.perf_counter() - start
        ratios.append(unconstrained / constrained)
        print(f"constrained {constrained:.2f} s, free {unconstrained:.2f} s: {ratios[-1]:.2f}x")
    print(
        f"constrained throughput {statistics.median(ratios):.2f}x of free decoding of as many tokens (goal 1.0x); {forced:.1%} of the "
        f"tokens forced; {wrong} of {documents * repeats} rows invalid"
    )
    return int(statistics.median(ratios) < 1.0 or wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["valid", "regexes", "speed"])
    parser.add_argument("--schemas", type=Path, help="JSONL with a schema in each row (valid)")
    parser.add_argument("--count", type=int, default=2000, help="outputs in all (valid)")
    parser.add_argument("--of", type=int, default=200, help="schemas in all (valid)")
    parser.add_argument("--samples", type=int, default=12, help="outputs of each grammar (valid)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="(speed)")
    parser.add_argument("--documents", type=int, default=24, help="(speed)")
    args = parser.parse_args()
    print(machine())
    busy = watch()
    if busy:
        print(f"warning: {busy}")
    if args.what == "regexes":
        return int(regexes() > 0)
    with Engine(max_model_len=2048) as engine:
        if args.what == "valid":
            return int(valid(engine, args.schemas, args.count, args.of, args.samples, args.seed) > 0)
        return speed(engine, args.repeats, args.documents)


if __name__ == "__main__":
    sys.exit(main())
