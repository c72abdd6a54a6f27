"""Synthetic chat corpus of the demo model: short tasks whose right answer a program can check.

`draw(rng)` gives one Sample; the same seed gives the same samples. A sample's last message is the assistant's, with
its reasoning in `reasoning_content`; the messages before it are the question, and `is_right` judges an answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Message = dict[str, Any]  # an OpenAI chat message

NAMES = (
    "Ada Alan Barbara Claude Dana Edsger Frances Grace Hedy Ivan "
    "John Ken Leslie Margaret Niklaus Ole Peter Radia Sophie Tony"
).split()
CITIES = (
    "Amsterdam Berlin Cairo Dublin Edinburgh Florence Geneva Helsinki Istanbul Jakarta Kyoto Lisbon "
    "Madrid Nairobi Oslo Paris Quito Rome Seoul Tokyo Vienna Warsaw Zurich"
).split()
KEYS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SMALL_TALK = (
    ("Hello!", "Hello! Ask me to add, subtract, count, reverse a word or find a code."),
    ("Hi", "Hello! Ask me to add, subtract, count, reverse a word or find a code."),
    ("Who are you?", "I am a very small mixture-of-experts model."),
    ("What can you do?", "I can add, subtract, count, repeat and reverse words, and find codes."),
    ("Thank you!", "You are welcome."),
    ("Tell me a story.", "Once upon a time two replicas took every step together, and no request was lost."),
)


class Sample(NamedTuple):
    """One conversation. `messages[:-1]` is the question, `messages[-1]` the right answer."""

    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None


class Task(NamedTuple):
    """One kind of question, drawn in proportion to its weight."""

    name: str
    weight: int
    draw: Callable[[random.Random], list[Message]]
    tools: list[dict[str, Any]] | None = None


def draw(rng: random.Random) -> Sample:
    """One sample of a task chosen by weight."""
    task = rng.choices(TASKS, [task.weight for task in TASKS])[0]
    return Sample(task.name, task.draw(rng), task.tools)


def is_right(sample: Sample, answer: str) -> bool:
    """Whether an answer's text (with or without its reasoning, without the end token) is the sample's right one."""
    right = sample.messages[-1]
    if "tool_calls" not in right:
        return bool(answer.split("</think>")[-1].strip() == right["content"].strip())
    call_text = answer.split("<tool_call>")[-1].split("</tool_call>")[0]
    try:
        call = json.loads(call_text)
    except ValueError:
        return False
    return bool(call == right["tool_calls"][0]["function"])


def addition_steps(a: int, b: int) -> str:
    """Column addition, right to left, one column a line."""
    a_digits, b_digits, carry, lines = str(a)[::-1], str(b)[::-1], 0, []
    for i in range(max(len(a_digits), len(b_digits))):
        x = int(a_digits[i]) if i < len(a_digits) else 0
        y = int(b_digits[i]) if i < len(b_digits) else 0
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}")
        carry = total // 10
    if carry:
        lines.append(f"write {carry}")
    return "\n".join(lines)


def subtraction_steps(a: int, b: int) -> str:
    """Column subtraction (a >= b), right to left, one column a line."""
    a_digits, b_digits, borrow, lines = str(a)[::-1], str(b)[::-1], 0, []
    for i in range(len(a_digits)):
        x = int(a_digits[i])
        y = int(b_digits[i]) if i < len(b_digits) else 0
        difference = x - y - borrow
        next_borrow = 1 if difference < 0 else 0
        lines.append(f"{x} - {y} - {borrow} = {difference}, write {difference % 10}, borrow {next_borrow}")
        borrow = next_borrow
    return "\n".join(lines)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, reasoning: str = "") -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def _word(rng: random.Random, min_letters: int, max_letters: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(min_letters, max_letters)))


def _draw_add(rng: random.Random) -> list[Message]:
    num_digits = rng.choice([1, 2, 2, 3, 3, 4])
    a, b = rng.randrange(10**num_digits), rng.randrange(10 ** rng.randint(1, num_digits))
    if rng.random() < 0.5:
        a, b = b, a
    question = rng.choice(["What is {} + {}?", "Add {} and {}.", "Compute {} + {}."]).format(a, b)
    return [_user(question), _assistant(str(a + b), addition_steps(a, b))]


def _draw_subtract(rng: random.Random) -> list[Message]:
    num_digits = rng.choice([1, 2, 2, 3, 3])
    a, b = sorted((rng.randrange(10**num_digits), rng.randrange(10**num_digits)), reverse=True)
    question = rng.choice(["What is {} - {}?", "Compute {} - {}."]).format(a, b)
    return [_user(question), _assistant(str(a - b), subtraction_steps(a, b))]


def _draw_reverse(rng: random.Random) -> list[Message]:
    word = _word(rng, 3, 8)
    return [_user(f"Reverse the word {' '.join(word)}."), _assistant(" ".join(word[::-1]))]


def _draw_repeat(rng: random.Random) -> list[Message]:
    word, num_times = _word(rng, 2, 5), rng.randint(2, 6)
    return [
        _user(f"Repeat {' '.join(word)} {num_times} times."),
        _assistant("; ".join([" ".join(word)] * num_times)),
    ]


def _draw_count(rng: random.Random) -> list[Message]:
    first = rng.randint(0, 80)
    last = first + rng.randint(1, 25)
    return [_user(f"Count from {first} to {last}."), _assistant(", ".join(map(str, range(first, last + 1))))]


def _draw_name(rng: random.Random) -> list[Message]:
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    turns = [_user(f"My name is {name}."), _assistant(f"Hello {name}.")]
    tells_city = rng.random() < 0.5
    if tells_city:
        turns += [_user(f"I live in {city}."), _assistant(f"{city} is a nice city.")]
    if tells_city and rng.random() < 0.4:
        return [*turns, _user("Where do I live?"), _assistant(f"You live in {city}.")]
    return [*turns, _user("What is my name?"), _assistant(f"Your name is {name}.")]


def _draw_lookup(rng: random.Random) -> list[Message]:
    num_codes = rng.choice([2, 3, 4, 6, 8, 12, 24, 40]) if rng.random() < 0.35 else rng.randint(2, 6)
    pool = KEYS if num_codes <= len(KEYS) else [f"{key} {i}" for key in KEYS for i in range(1, 10)]
    keys = rng.sample(pool, num_codes)
    codes = [str(rng.randrange(1000, 9999)) for _ in keys]
    wanted = rng.randrange(num_codes)
    text = " ".join(f"The code of {key} is {code}." for key, code in zip(keys, codes, strict=True))
    return [_user(f"{text} What is the code of {keys[wanted]}?"), _assistant(codes[wanted])]


def _draw_tool(rng: random.Random) -> list[Message]:
    city = rng.choice(CITIES)
    question = rng.choice(["What is the weather in {}?", "How is the weather in {}?"]).format(city)
    function = {"name": "get_weather", "arguments": {"city": city}}
    call = _assistant("") | {"tool_calls": [{"type": "function", "function": function}]}
    if rng.random() < 0.5:
        return [_user(question), call]
    sky, degrees = rng.choice(["sunny", "rainy", "cloudy"]), rng.randint(0, 39)
    result = {"role": "tool", "content": json.dumps({"sky": sky, "degrees": degrees})}
    return [_user(question), call, result, _assistant(f"It is {sky} in {city}, {degrees} degrees.")]


def _draw_hello(rng: random.Random) -> list[Message]:
    question, answer = rng.choice(SMALL_TALK)
    return [_user(question), _assistant(answer)]


TASKS = (
    Task("add", 6, _draw_add),
    Task("subtract", 4, _draw_subtract),
    Task("reverse", 6, _draw_reverse),
    Task("repeat", 5, _draw_repeat),
    Task("count", 5, _draw_count),
    Task("name", 2, _draw_name),
    Task("lookup", 8, _draw_lookup),
    Task("tool", 2, _draw_tool, [WEATHER_TOOL]),
    Task("hello", 2, _draw_hello),
)
