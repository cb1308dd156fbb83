"""Schemas by keyword, each with JSON texts that it accepts and texts that it refuses (compact, keys in the order declared)."""

from __future__ import annotations

from typing import Any

Row = tuple[str, Any, list[str], list[str]]

ROWS: list[Row] = [
    ("true", True, ["1", '"a"', "null", '{"a":[1,{"b":null}]}', "[]", "-0.5e+3"], ["", "01", '{"a"}', "[1,]", "+1"]),
    ("type", {"type": "integer"}, ["0", "-12", "1.0"], ["1.5", '"1"', "01", "true", "--1"]),
    ("type list", {"type": ["string", "null"]}, ['""', "null", '"\\u00e9"', '"é"'], ["1", "nul", '"\n"', '"\\x"']),
    ("draft 4 integer", {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}, ["1"], ["1.0"]),
    (
        "enum",
        {"enum": [1, "a", None, [1, {"x": 2}]]},
        ["1", "1.0", '"a"', "null", '[1,{"x":2}]'],
        ["2", "true", "[1]", '"b"'],
    ),
    ("enum prefix", {"enum": [1, 12, 123]}, ["1", "12", "123"], ["2", "1234", "13"]),
    ("const zero", {"const": 0}, ["0", "0.0"], ["false", "1", "00"]),
    ("const false", {"const": False}, ["false"], ["0", "[]", "null"]),
    ("const object", {"const": {"a": 1, "b": [True]}}, ['{"a":1,"b":[true]}'], ['{"a":1}', '{"a":1,"b":[1]}', "{}"]),
    ("minimum", {"type": "number", "minimum": -2.5}, ["-2.5", "-2", "0", "1e+20", "3.25"], ["-2.6", "-3", "-1e+20"]),
    (
        "exclusive",
        {"exclusiveMinimum": 0, "exclusiveMaximum": 10, "type": "number"},
        ["0.1", "9.99", "1"],
        ["0", "10", "0.0"],
    ),
    (
        "exclusive draft 4",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        ["4", "10"],
        ["3", "2"],
    ),
    (
        "integer range",
        {"type": "integer", "minimum": -5, "maximum": 120},
        ["-5", "0", "99", "120"],
        ["-6", "121", "1200", "1.5"],
    ),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, ["0", "7", "-14", "21"], ["1", "20"]),
    ("multipleOf decimal", {"type": "number", "multipleOf": 0.01}, ["0.07", "4.35", "3", "1.10"], ["0.075", "0.001"]),
    ("no other integers", {"type": "number", "not": {"type": "integer"}}, ["1.5", "-0.25"], ["1", "2.0", "10"]),
    (
        "length",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"ab"', '"\U0001f600é"', '"\\ud83d\\ude00a"'],
        ['"a"', '"abcd"'],
    ),
    ("pattern", {"type": "string", "pattern": "^a+b?$"}, ['"a"', '"aab"'], ['"b"', '"abb"', '"ba"']),
    ("pattern searches", {"type": "string", "pattern": "\\d{2}"}, ['"12"', '"x99y"'], ['"1a2"', '""']),
    ("pattern and length", {"pattern": "^[ab]*$", "maxLength": 2, "type": "string"}, ['""', '"ab"'], ['"aba"', '"c"']),
    (
        "patterns",
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]},
        ['"az"', '"abz"'],
        ['"a"', '"z"'],
    ),
    ("not pattern", {"type": "string", "not": {"pattern": "a"}}, ['"b"', '""'], ['"a"', '"ba"', '"b\\u0061"']),
    ("format", {"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-2-1"', '""']),
    ("unknown format", {"type": "string", "format": "my-own"}, ['"x"'], ["1"]),
    (
        "items",
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        ["[1]", "[1,2,3]"],
        ["[]", "[1,2,3,4]", '["a"]'],
    ),
    (
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', '[1,"a",1]', "[1,2]"],
    ),
    (
        "items list",
        {"items": [{"type": "integer"}], "additionalItems": {"type": "null"}, "type": "array", "minItems": 2},
        ["[1,null]", "[1,null,null]"],
        ["[1]", "[1,2]", "[null,null]"],
    ),
    (
        "contains",
        {"type": "array", "contains": {"const": 5}, "items": {"type": "integer"}},
        ["[5]", "[1,5,2]", "[5,5]"],
        ["[]", "[1,2]"],
    ),
    (
        "contains counts",
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "minContains": 2, "maxContains": 3},
        ["[5,6]", "[1,9,2,8,7]"],
        ["[5]", "[5,6,7,8]", "[1,2]"],
    ),
    (
        "contains in bounds",
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minItems": 2, "maxItems": 3},
        ["[1,2]", "[2,1,1]"],
        ["[2]", "[1,1]", "[1,1,1,2]"],
    ),
    (
        "uniqueItems",
        {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True},
        ["[]", '["a",1]', '[null,"a",1]'],
        ["[1,1]", "[1,1.0]"],
    ),
    (
        "uniqueItems of two",
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
        ["[true]", "[false,true]"],
        ["[]", "[true,true]"],
    ),
    (
        "properties",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        ['{"a":1}', '{"a":1,"b":"x"}'],
        ["{}", '{"b":"x"}', '{"a":1,"c":1}', '{"a":"x"}', '{"a":1,}', '{"a":1,"\\u0063":2}'],
    ),
    (
        "other keys",
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        ["{}", '{"ab":1}', '{"ab":1,"a":null,"abc":null,"":null}', '{"\\u00e4":null}'],
        ['{"ab":null}', '{"a\\u0062":null}', '{"\\u0061b":null}', '{"x":1}'],
    ),
    (
        "other keys, odd names",
        {
            "type": "object",
            "properties": {'q"': {"type": "integer"}, "é": {"type": "integer"}},
            "additionalProperties": {"type": "null"},
        },
        ['{"q\\"":1,"é":2,"q":null}', '{"\\u00e9":2}'],
        ['{"q\\"":null}', '{"\\u00e9":null}', '{"\\u00E9":null}'],
    ),
    (
        "patternProperties",
        {
            "type": "object",
            "properties": {"x1": {"maximum": 9}},
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": False,
        },
        ["{}", '{"x1":5}', '{"x1":5,"xy":70}'],
        ['{"x1":10}', '{"x1":"a"}', '{"y":1}', '{"xy":"a"}'],
    ),
    (
        "patterns overlap",
        {
            "type": "object",
            "patternProperties": {"a": {"minimum": 5}, "b": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        ['{"ab":7}', '{"a":5.5}', '{"b":1}', '{"c":"x"}'],
        ['{"ab":5.5}', '{"ab":1}', '{"c":1}', '{"b":"x"}'],
    ),
    (
        "propertyNames",
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"ab":1}'],
        ['{"abc":1}', '{"a":"x"}'],
    ),
    (
        "propertyNames enum",
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        ['{"a":1}', '{"b":1,"a":2}'],
        ['{"c":1}'],
    ),
    ("minProperties", {"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    (
        "property counts",
        {
            "type": "object",
            "properties": {k: {"type": "integer"} for k in "abcd"},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": 3,
        },
        ['{"a":1,"b":2}', '{"b":1,"c":2,"d":3}'],
        ["{}", '{"a":1}', '{"a":1,"b":1,"c":1,"d":1}'],
    ),
    (
        "maxProperties",
        {"type": "object", "maxProperties": 1, "properties": {"a": {"type": "null"}}},
        ["{}", '{"a":null}', '{"z":1}'],
        ['{"a":null,"b":1}'],
    ),
    (
        "dependentRequired",
        {
            "type": "object",
            "properties": {"a": True, "b": True},
            "dependentRequired": {"b": ["a"]},
            "additionalProperties": False,
        },
        ["{}", '{"a":1}', '{"a":1,"b":2}'],
        ['{"b":1}'],
    ),
    (
        "dependentSchemas",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"minimum": 5}}}},
        },
        ["{}", '{"b":1}', '{"a":1,"b":5}'],
        ['{"a":1}', '{"a":1,"b":1}'],
    ),
    (
        "dependencies",
        {"type": "object", "properties": {"a": True, "b": True}, "dependencies": {"b": ["a"]}},
        ['{"a":1,"b":1}', "{}"],
        ['{"b":1}'],
    ),
    (
        "allOf closed objects",
        {
            "allOf": [
                {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                    "additionalProperties": False,
                },
                {"properties": {"b": {"minLength": 2}, "c": True}, "additionalProperties": {"minimum": 3}},
            ]
        },
        ["{}", '{"a":3}', '{"a":4,"b":"xy"}'],
        ['{"a":1}', '{"b":"x"}', '{"c":1}'],
    ),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, ["1", '"a"'], ['"ab"', "null"]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, ["1", "2.5"], ["3", "1.5"]),
    (
        "oneOf required",
        {
            "type": "object",
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"b":1}'],
    ),
    (
        "oneOf by kind",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": c}, c: {"type": "integer"}},
                    "required": ["k", c],
                    "additionalProperties": False,
                }
                for c in "xyz"
            ]
        },
        ['{"k":"x","x":1}', '{"k":"z","z":1}'],
        ['{"k":"x","y":1}', '{"k":"x"}', '{"k":"w","w":1}'],
    ),
    ("not", {"not": {"type": ["string", "object", "array"]}}, ["1", "null", "true"], ['"a"', "{}", "[]"]),
    ("not enum", {"type": "string", "not": {"enum": ["a", "ab"]}}, ['"b"', '"abc"', '""'], ['"a"', '"ab"']),
    (
        "not object",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": False,
            "not": {"required": ["a"]},
        },
        ["{}"],
        ['{"a":1}'],
    ),
    (
        "not closed",
        {"type": "object", "not": {"additionalProperties": {"type": "string"}}},
        ['{"a":1}', '{"b":"x","a":1}'],
        ["{}", '{"a":"x"}'],
    ),
    (
        "not closed, the last of equal keys counts",
        {"type": "object", "minProperties": 1, "not": {"additionalProperties": {"type": "string"}}},
        ['{"a":"x","a":1}', '{"a":"x","b":1}'],
        ['{"a":1,"a":"x"}', '{"a":"x"}'],
    ),
    (
        "$dynamicRef",
        {
            "$id": "http://e.x/strict",
            "$ref": "tree",
            "$dynamicAnchor": "node",
            "unevaluatedProperties": False,
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$dynamicAnchor": "node",
                    "type": "object",
                    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
                }
            },
        },
        ['{"children":[{"data":1}]}', '{"data":1,"children":[]}'],
        ['{"children":[{"daat":1}]}', '{"daat":1}'],
    ),
    ("not array", {"type": "array", "not": {"items": {"type": "integer"}}}, ['["a"]', '[1,"a"]'], ["[]", "[1,2]"]),
    (
        "if then else",
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "v": True},
            "required": ["k", "v"],
            "additionalProperties": False,
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        ['{"k":"a","v":1}', '{"k":"b","v":"x"}'],
        ['{"k":"a","v":"x"}', '{"k":"b","v":1}'],
    ),
    (
        "$ref recursive",
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
        },
        ['{"v":1}', '{"v":1,"next":{"v":2,"next":{"v":3}}}'],
        ["{}", '{"v":1,"next":{}}'],
    ),
    (
        "$ref recursive through allOf",
        {
            "$defs": {"t": {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/t"}, {"maxItems": 2}]}}},
            "$ref": "#/$defs/t",
        },
        ["[]", "[[],[[]],[]]"],
        ["[[[],[],[]]]", "[1]"],
    ),
    ("$anchor", {"$defs": {"x": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, ["null"], ["1"]),
    (
        "$id",
        {
            "$id": "http://e.x/root",
            "$defs": {"x": {"$id": "sub", "$defs": {"y": {"type": "null"}}}},
            "$ref": "sub#/$defs/y",
        },
        ["null"],
        ["1"],
    ),
    ("$ref escapes", {"$defs": {"a/b~c%": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c%25"}, ["null"], ["1"]),
    (
        "$ref with siblings",
        {"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 3},
        ["3"],
        ["2", '"a"'],
    ),
    (
        "$ref alone in draft 7",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"i": {"type": "integer"}},
            "properties": {"a": {"$ref": "#/definitions/i", "minimum": 3}},
        },
        ['{"a":1}'],
        ['{"a":"x"}'],
    ),
    (
        "unevaluatedProperties",
        {
            "type": "object",
            "properties": {"a": True},
            "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}, {"properties": {"c": True}}],
            "unevaluatedProperties": False,
        },
        ["{}", '{"a":1,"c":2}', '{"a":1,"b":1,"c":2}'],
        ['{"b":2}', '{"d":1}', '{"a":1,"b":3,"c":2}'],
    ),
    (
        "unevaluatedItems",
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "null"}},
        ["[]", "[1]", "[1,null]"],
        ["[1,2]", "[null]"],
    ),
]
