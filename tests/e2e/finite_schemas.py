"""All values of a JSON schema, where there are not too many: an oracle for grammars that knows nothing of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

MOST_VALUES: Final = 12_000
_ABSENT: Final = object()


class NotFinite(Exception):
    """The schema has other keywords, or more values than are of use."""


def all_texts(schema: Any) -> set[bytes]:
    """How every value of the schema is written. Raises NotFinite."""
    values = list(itertools.islice(_values(schema, schema), MOST_VALUES + 1))
    if len(values) > MOST_VALUES:
        raise NotFinite
    return {json.dumps(value, ensure_ascii=False).encode() for value in values}


def _values(schema: Any, root: Any) -> Iterator[Any]:
    if "enum" in schema:
        return iter(schema["enum"])
    if "const" in schema:
        return iter([schema["const"]])
    if "anyOf" in schema or "oneOf" in schema:
        return itertools.chain.from_iterable(_values(one, root) for one in schema.get("anyOf") or schema["oneOf"])
    if "$ref" in schema:
        return _values(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return itertools.chain.from_iterable(_of_type(kind, schema, root) for kind in kinds)


def _of_type(kind: str, schema: Any, root: Any) -> Iterator[Any]:
    match kind:
        case "null":
            return iter([None])
        case "boolean":
            return iter([True, False])
        case "integer":
            return iter(range(schema["minimum"], schema["maximum"] + 1))
        case "array":
            return _arrays(schema, root)
        case "object":
            return _objects(schema, root)
    raise NotFinite


def _arrays(schema: Any, root: Any) -> Iterator[Any]:
    items = list(itertools.islice(_values(schema["items"], root), MOST_VALUES + 1))
    lengths = range(schema["minItems"], schema["maxItems"] + 1)
    return (list(some) for length in lengths for some in itertools.product(items, repeat=length))


def _objects(schema: Any, root: Any) -> Iterator[Any]:
    columns = []
    for name, of in schema["properties"].items():
        found = list(itertools.islice(_values(of, root), MOST_VALUES + 1))
        columns.append(found if name in schema["required"] else [*found, _ABSENT])
    names = list(schema["properties"])
    for row in itertools.product(*columns):
        yield {name: value for name, value in zip(names, row, strict=True) if value is not _ABSENT}
