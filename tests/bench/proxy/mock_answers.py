"""The canned documents of mock_worker.py: whole answers and the frames of streams."""

from __future__ import annotations

import json

REASONS = {
    200: "OK",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
STAMP_SLOT = b"@0123456789abcdef"
EDGE = 4096  # how much of each end of a request body is searched for its flags
RID = "chatcmpl-0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def http_answer(status: int, body: bytes, ctype: str = "application/json") -> bytes:
    """A whole HTTP answer with a Content-Length."""
    head = (
        f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\ncontent-type: {ctype}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def json_answer(value, status: int = 200) -> bytes:
    """`http_answer` for a JSON value."""
    return http_answer(status, json.dumps(value, separators=(",", ":")).encode())


def http_chunk(payload: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def header(low: bytes, name: bytes) -> bytes:
    """The value of a header in a lower-cased head, or `b""`."""
    at = low.find(b"\r\n" + name + b":")
    if at < 0:
        return b""
    stop = low.find(b"\r\n", at + 2)
    return low[at + len(name) + 3 : stop if stop > 0 else None].strip()


class Shape:
    """The canned documents of one inference endpoint."""

    def __init__(self, model: str, kind: str):
        usage = {"prompt_tokens": 32, "completion_tokens": 16, "total_tokens": 48}
        text = "The quick brown fox jumps over the lazy dog, and then it does so again."
        slot = STAMP_SLOT.decode()
        base = {"id": RID, "created": 1700000000, "model": model}
        if kind == "chat":
            whole = base | {
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": usage,
            }
            part = base | {
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": {"content": slot}, "logprobs": None, "finish_reason": None}],
            }
            final = base | {
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
            }
        elif kind == "text":
            whole = base | {
                "object": "text_completion",
                "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}],
                "usage": usage,
            }
            # Clients look for "content"; the text endpoints carry it as an extra field.
            part = base | {
                "object": "text_completion",
                "choices": [{"index": 0, "text": "x", "content": slot, "logprobs": None, "finish_reason": None}],
            }
            final = base | {
                "object": "text_completion",
                "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
            }
        else:  # SGLang's /generate
            meta = {
                "id": RID,
                "finish_reason": {"type": "stop"},
                "prompt_tokens": 32,
                "completion_tokens": 16,
                "cached_tokens": 0,
            }
            whole = {"text": text, "meta_info": meta}
            part = {"text": "x", "content": slot, "meta_info": meta | {"finish_reason": None}}
            final = {"text": text, "meta_info": meta}
        compact = {"separators": (",", ":")}
        self.whole = json_answer(whole)
        frame = http_chunk(b"data: " + json.dumps(part, **compact).encode() + b"\n\n")
        self.frame_head, self.frame_tail = frame.split(STAMP_SLOT)
        self.final = (
            http_chunk(b"data: " + json.dumps(final, **compact).encode() + b"\n\n")
            + http_chunk(b"data: [DONE]\n\n")
            + LAST_CHUNK
        )

    def frame(self, now_ns: int) -> bytes:
        """One content chunk, stamped."""
        return b"%s@%016x%s" % (self.frame_head, now_ns, self.frame_tail)

    def first_frame(self, own_ns: int, stamps: tuple[int, ...]) -> bytes:
        """A stream's first chunk, which says how long the worker itself took for it, and more times if given."""
        payload = b"".join(b"#%016x" % ns for ns in (own_ns, *stamps))
        head = self.frame_head.partition(b"\r\n")[2]
        return http_chunk(head + payload + self.frame_tail.removesuffix(b"\r\n"))
