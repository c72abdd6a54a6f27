"""`lm-eval` against a running server: `python tests/clients/lm_eval_client.py URL MODEL_FOLDER`. Prints JSON.

A task made of the demo model's corpus, by local-completions (log likelihoods of choices, and answers) and by
local-chat-completions (answers). The scores must equal our own: those of asking the server the same directly.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import lm_eval
import requests
from lm_eval.tasks import TaskManager

NUM_QUESTIONS: Final = 18
# The model is good at the first two and bad at the last, so that scores say more than that all is right.
TASKS: Final = ("add", "subtract", "count")
SEED: Final = 5
GENERATE: Final = """task: demo_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{text}"
doc_to_target: answer
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 220, temperature: 0}}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "(-?[0-9]+)\\\\s*$", group_select: -1}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE: Final = """task: demo_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{steps}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def questions(folder: Path) -> list[dict[str, Any]]:
    """Questions of the corpus, as prompts for both kinds of task."""
    spec = importlib.util.spec_from_file_location("demo_corpus", folder / "training" / "corpus.py")
    assert spec is not None and spec.loader is not None
    corpus = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = corpus
    spec.loader.exec_module(corpus)
    draw, found = random.Random(SEED), list[dict[str, Any]]()
    while len(found) < NUM_QUESTIONS:
        sample = corpus.draw(draw)
        if sample.task != TASKS[len(found) % len(TASKS)]:
            continue
        *_, asked, answered = sample.messages
        answer = _last_number(answered["content"])
        assert answer is not None
        prompt = f"<|im_start|>user\n{asked['content']}<|im_end|>\n<|im_start|>assistant\n"
        doc = {"question": asked["content"], "prompt": prompt, "answer": answer}
        if "reasoning_content" in answered:  # the choices follow it
            label = draw.randrange(3)
            doc["steps"] = f"{prompt}<think>\n{answered['reasoning_content']}\n</think>\n\n"
            doc |= {"choices": [str(int(answer) + 3 * (i - label)) for i in range(3)], "label": label}
        found.append(doc)
    return found


def own_scores(url: str, asked: list[dict[str, Any]]) -> dict[str, float]:
    """The same, asked directly."""
    chats = completions = choices = 0
    with_choices = [doc for doc in asked if "choices" in doc]
    for doc in asked:
        messages = [{"role": "user", "content": doc["question"]}]
        answer = _post(url, "/v1/chat/completions", messages=messages, max_tokens=220)
        chats += _last_number(answer["choices"][0]["message"]["content"]) == doc["answer"]
        answer = _post(url, "/v1/completions", prompt=doc["prompt"], max_tokens=220)
        completions += _last_number(answer["choices"][0]["text"]) == doc["answer"]
    for doc in with_choices:
        likelihoods = [_log_likelihood(url, doc["steps"], choice) for choice in doc["choices"]]
        choices += likelihoods.index(max(likelihoods)) == doc["label"]
    return {
        "chat answers": chats / len(asked),
        "completion answers": completions / len(asked),
        "choices": choices / len(with_choices),
    }


def lm_eval_scores(url: str, folder: Path, asked: list[dict[str, Any]]) -> dict[str, float]:
    """By lm-eval's own models and metrics."""
    with tempfile.TemporaryDirectory() as place:
        scores = {}
        for name, kind, task, text, metric in (
            ("chat answers", "chat-completions", GENERATE, "{{question}}", "exact_match,last"),
            ("completion answers", "completions", GENERATE, "{{prompt}}", "exact_match,last"),
            ("choices", "completions", CHOOSE, "", "acc,none"),
        ):
            tasks = Path(place) / name.replace(" ", "_")
            tasks.mkdir()
            data = tasks / "questions.jsonl"
            docs = [doc for doc in asked if task is GENERATE or "choices" in doc]
            data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
            (tasks / "task.yaml").write_text(task.format(data=data, text=text))
            scores[name] = _evaluate(url, folder, kind, tasks, metric)
    return scores


def _evaluate(url: str, folder: Path, kind: str, tasks: Path, metric: str) -> float:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=f"local-{kind}",
        model_args={
            **{"model": folder.name, "base_url": f"{url}/v1/{kind.replace('chat-', 'chat/')}", "num_concurrent": 4},
            **{"tokenizer": str(folder), "tokenizer_backend": "huggingface", "max_retries": 1, "max_length": 4096},
        },
        tasks=manager.all_tasks,
        task_manager=manager,
        apply_chat_template=kind == "chat-completions",
        bootstrap_iters=0,
    )
    (scores,) = result["results"].values()
    return float(scores[metric])


def _log_likelihood(url: str, context: str, choice: str) -> float:
    """Of the choice's tokens after the context, as echo reports it."""
    num_context = len(
        _post(url, "/v1/completions", prompt=context, max_tokens=1, return_token_ids=True)["choices"][0][
            "prompt_token_ids"
        ]
    )
    answer = _post(url, "/v1/completions", prompt=context + choice, echo=True, logprobs=1, max_tokens=1)
    return float(sum(answer["choices"][0]["logprobs"]["token_logprobs"][num_context:-1]))


def _last_number(text: str) -> str | None:
    found = re.findall(r"(-?[0-9]+)\s*$", text)
    return found[-1] if found else None


def _post(url: str, path: str, **body: Any) -> Any:
    response = requests.post(url + path, json={"temperature": 0, **body}, timeout=120)
    response.raise_for_status()
    return response.json()


def main(argv: list[str]) -> int:
    """Compares the scores."""
    url, folder = argv[0], Path(argv[1])
    asked = questions(folder)
    own, theirs = own_scores(url, asked), lm_eval_scores(url, folder, asked)
    print(json.dumps({"client": f"lm-eval {lm_eval.__version__}", "own": own, "lm-eval": theirs}))
    return 0 if own == theirs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
