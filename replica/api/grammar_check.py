"""A process that tries grammars before the engine compiles them: `python -m replica.api.grammar_check`.

    engine -> here   the vocabulary, then one grammar a line: JSON, as `Vocabulary` and a string
    here -> engine   a JSON string for each grammar: what is wrong with it, or ""
    EOF              the engine is gone, and this process ends at once

Compiling can take exponential time and memory, or end the process in the compiler's native code, and a thread cannot
be stopped. A process can: the engine kills this one when a grammar takes too long.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from typing import Any, Final

from replica.api.grammar import LIMITS, Vocabulary, new_matcher

MAX_MASK_S: Final = 0.25  # every sequence of the replica waits for a mask, and the first is the slowest
MAX_MEMORY_BYTES: Final = 4 * 2**30  # address space: a vocabulary of 250,000 tokens takes a tenth of it
MAX_COMPLAINT_CHARS: Final = 4000  # errors quote the schema, and the engine reads no line of more than 64 KiB


def check(vocabulary: Vocabulary, grammars: queue.SimpleQueue[str]) -> None:
    """Answers one grammar after the other, for ever."""
    tokenizer = vocabulary.tokenizer()
    while True:
        matcher = new_matcher(tokenizer, json.loads(grammars.get()), LIMITS)
        print(json.dumps(complaint(matcher, max_mask_s=MAX_MASK_S)), flush=True)


def complaint(matcher: Any, *, max_mask_s: float) -> str:
    """What is wrong with a compiled grammar, one whose first mask takes over `max_mask_s` of CPU included, or ""."""
    began_s = time.process_time()
    if not matcher.is_error():
        matcher.compute_bitmask()  # some grammars break at their first token
    took_s = time.process_time() - began_s
    error: str = matcher.get_error()
    if not error and took_s > max_mask_s:
        return f"finding its first tokens takes {took_s:.2f} s, limit is {max_mask_s:g} s"
    return error[:MAX_COMPLAINT_CHARS]


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # not sys.exit: the main thread may be inside a compilation that never ends


def main() -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for the supervisor; the engine's end is this one's
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="stdin", daemon=True).start()
    check(Vocabulary.from_json(lines.get()), lines)


if __name__ == "__main__":
    main()
