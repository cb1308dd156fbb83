"""JSON Schema to grammar: ``compile_schema`` turns a schema into the byte grammar of exactly the JSON texts it accepts."""

from radixrt.grammar.schema.compile import compile_schema
from radixrt.grammar.schema.limits import SchemaLimits

__all__ = ["SchemaLimits", "compile_schema"]
