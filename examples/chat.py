"""A chat of several turns: the state remembers, and a turn computes only what is new."""

from __future__ import annotations

from lang import ProgramState, assistant, function, gen, system, user

QUESTIONS = [
    "What is the capital of France?",
    "What is it famous for?",
    "Which language do people speak there?",
]


@function
def chat(s: ProgramState, questions: list[str]) -> None:
    s += system("You are a helpful assistant. Answer in one short sentence.")
    for turn, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer{turn}", max_tokens=32))


def main() -> None:
    state = chat.run(QUESTIONS, temperature=0)
    for turn, question in enumerate(QUESTIONS):
        cost = state.meta(f"answer{turn}")
        print(f"you:   {question}")
        print(f"model: {state[f'answer{turn}']}")
        print(f"       [{cost['cached_tokens']} tokens cached, {cost['computed_tokens']} computed]")
    assert [message["role"] for message in state.messages()] == ["system", *["user", "assistant"] * len(QUESTIONS)]


if __name__ == "__main__":
    main()
