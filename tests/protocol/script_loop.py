"""A step loop whose every request has a script of its own: the one whose number is its seed."""

from __future__ import annotations

import random

from replica.request import FinishReason, Sequence, TokenLogprobs, TokenOutput
from tests.protocol.fake_loop import MODEL, FakeLoop

PARTS = [
    *(
        "<think>\nhm\n</think>\n\n",
        "yes",
        " \N{ROCKET}",
        "e\N{COMBINING ACUTE ACCENT}",
        "漢字",
        "\n",
        " END ",
        "EN",
        "<tool",
    ),
    '<tool_call>\n{"name": "f", "arguments": {"x": [1, "\N{ROCKET}"]}}\n</tool_call>',
    '<tool_call>\n{"arguments": {"y": {}}, "name": "g"}\n</tool_call>',
    "<tool_call>\nnot a call\n</tool_call>",
]


class ScriptLoop(FakeLoop):
    """Several tokens come together at times, and each has made-up log probabilities."""

    def step(self) -> None:
        self.num_steps += 1
        for sequence in list(self.running):
            if self.num_steps % 3 or sequence.choice % 2:
                self._say(sequence)
            else:  # it lags, and says two at once
                self._say(sequence)
                if sequence in self.running:
                    self._say(sequence)
        self.notify()

    def _say(self, sequence: Sequence) -> None:
        params = sequence.params
        script = script_of(params.seed, sequence.choice)
        token_id = script[len(sequence.output_ids) % len(script)]
        sequence.output_ids.append(token_id)
        reason = None
        if token_id in params.stop_token_ids:
            reason = FinishReason.STOP
        elif len(sequence.output_ids) == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.running.remove(sequence)
        if params.prompt_logprobs is not None and not sequence.prompt_logprobs:
            sequence.prompt_logprobs = [made_up(i, params.prompt_logprobs) for i in sequence.prompt_ids[1:]]
        found = () if params.logprobs is None else (made_up(token_id, params.logprobs),)
        sequence.stream.put(TokenOutput((token_id,), reason, logprobs=found))


def script_of(seed: int, choice: int) -> list[int]:
    draw = random.Random(f"{seed}/{choice}")
    text = "".join(draw.choices(PARTS, k=draw.randint(1, 6)))
    if draw.random() < 0.5 and "<think>" in text:
        text = text[text.index("<think>") :]
    return MODEL.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)


def made_up(token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 100, tuple((i, -i / 10) for i in range(1, num_top + 1)))
