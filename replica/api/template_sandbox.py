"""Where chat templates run: jinja2's sandbox, what transformers gives a template there, and a bound on its time.

A template is a program, and one that loops need not write anything meanwhile. So the time is looked at wherever a
template can repeat itself: at each turn of a loop and each call (of a macro, of a recursive loop), besides at each
piece of text. What stands between two such places is finite.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

WORK_S: Final = 0.001  # a rendering beside the event loop rests after so long, because
REST_S: Final = 0.0001  # threads of Python take turns, and one that only computes keeps the others waiting for 5 ms
_TIMED: Final = "lockstep_timed"  # the filter that each loop's items pass through


class OutOfTime(Exception):
    """The template took longer than it may."""


class Timer:
    """The time of one rendering. `is_beside`: in a thread beside the event loop, which it must leave room for."""

    def __init__(self, limit_s: float, *, is_beside: bool) -> None:
        now_s = time.monotonic()
        self._deadline_s = now_s + limit_s
        self._rest_s = now_s + WORK_S if is_beside else self._deadline_s

    def check(self) -> None:
        """Raises OutOfTime once it is over."""
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            raise OutOfTime
        if now_s > self._rest_s:
            time.sleep(REST_S)
            self._rest_s = now_s + WORK_S


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What transformers renders templates in, with a timer."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.context_class = _TimedContext
        self.filters["tojson"] = _tojson
        self.filters[_TIMED] = _timed
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def template(self, source: str) -> jinja2.Template:
        """Compiles a template. Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = jinja2.nodes.Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
        return self.from_string(tree)

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """From jinja2: whatever a template calls."""
        _check(context)
        return super().call(context, called, *args, **kwargs)


def render(template: jinja2.Template, variables: Mapping[str, Any], timer: Timer) -> Iterator[str]:
    """The pieces of the text. Raises OutOfTime, and whatever else the template raises."""
    context = template.new_context(dict(variables))
    assert isinstance(context, _TimedContext)
    context.timer = timer
    for piece in template.root_render_func(context):
        timer.check()
        yield piece


class _TimedContext(jinja2.runtime.Context):
    """The variables of one rendering, and its timer."""

    timer: Timer | None = None

    def derived(self, locals: dict[str, Any] | None = None) -> jinja2.runtime.Context:
        """From jinja2: the context of a block."""
        made = super().derived(locals)
        assert isinstance(made, _TimedContext)
        made.timer = self.timer
        return made


def _check(context: jinja2.runtime.Context) -> None:
    assert isinstance(context, _TimedContext)
    if context.timer is not None:  # none while jinja2 compiles
        context.timer.check()


@jinja2.pass_context
def _timed(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check(context)
        yield item


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
