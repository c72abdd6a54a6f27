"""Values that follow a JSON schema, drawn by hypothesis: of the keywords that the replica's description uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

MOST_ITEMS = 3
MOST_CHARS = 20
NOTHING: Mapping[str, Any] = {"not": {}}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=5), s, max_size=2),
    max_leaves=5,
)


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Any value that the schema allows, or at least small ones."""
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "string":
            return _strings(schema)
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False)
        case "array":
            most = min(MOST_ITEMS, schema.get("maxItems", MOST_ITEMS))
            return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
        case "object":
            return _objects(schema)
    assert not schema, schema
    return ANYTHING


def _strings(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].replace("$", r"\Z"))
    return st.text(min_size=schema.get("minLength", 0), max_size=min(MOST_CHARS, schema.get("maxLength", MOST_CHARS)))


def _objects(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    if not properties:
        names = _strings(schema.get("propertyNames", {}))
        return st.dictionaries(names, values(schema.get("additionalProperties", {})), max_size=2)
    drawn = {name: values(of) for name, of in properties.items() if of != NOTHING}
    required = sorted(schema.get("required", ()))
    optional = sorted(drawn.keys() - set(required))

    @st.composite
    def draw_object(draw: st.DrawFn) -> dict[str, Any]:
        some = draw(st.lists(st.sampled_from(optional), max_size=MOST_ITEMS, unique=True)) if optional else []
        return {name: draw(drawn[name]) for name in [*required, *some]}

    return draw_object()
