"""Typed extraction: each document becomes an object of a pydantic model, valid by construction."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from lang import ProgramState, assistant, function, gen, system, user

DOCUMENTS = [
    "Anna Berg, 34, came in by train on Monday. She would like a quiet room.",
    "On Friday Mr. Peter Novak (58) will arrive by car, with his two dogs.",
    "Maria Silva is 27. She flies in on Sunday evening.",
]


class Guest(BaseModel):
    name: Annotated[str, Field(min_length=3, max_length=24)]
    age: Annotated[int, Field(ge=0, le=120)]
    travels_by: Literal["train", "car", "plane"]
    day: Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


@function
def extract(s: ProgramState, document: str) -> None:
    s += system("Write down the guest as JSON with name, age, travels_by and day.")
    s += user("Paul Smith (41) drives here on Tuesday.")
    s += assistant('{"name":"Paul Smith","age":41,"travels_by":"car","day":"Tuesday"}')
    s += user("Last Wednesday Eva Lind came on the night train. She is 19.")
    s += assistant('{"name":"Eva Lind","age":19,"travels_by":"train","day":"Wednesday"}')
    s += user(document)
    s += assistant(gen("guest", type=Guest, max_tokens=64))


def main() -> None:
    for state in extract.run_batch([{"document": document} for document in DOCUMENTS], temperature=0):
        guest: Guest = state["guest"]
        print(f"{guest.name} ({guest.age}) comes by {guest.travels_by} on {guest.day}")


if __name__ == "__main__":
    main()
