"""Values that follow a JSON schema, drawn by hypothesis: of the keywords that the replica's description uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

MOST_ITEMS = 3
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3)
)


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Any value that the schema allows, or at least small ones."""
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema and "properties" not in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"].replace("$", r"\Z"))
        return st.text(min_size=schema.get("minLength", 0), max_size=20)
    if kind == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    if kind == "number":
        return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False)
    if kind == "boolean":
        return st.booleans()
    if kind == "array":
        most = min(MOST_ITEMS, schema.get("maxItems", MOST_ITEMS))
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
    if kind == "object":
        return _objects(schema)
    assert kind is None, schema
    return ANYTHING


def _objects(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = set(schema.get("required", ()))
    for one in schema.get("anyOf", ())[:1]:
        required |= set(one["required"])
    optional = {name: values(of) for name, of in properties.items() if name not in required}
    fixed = st.fixed_dictionaries({name: values(properties[name]) for name in sorted(required)})
    if not optional:
        return fixed
    some = st.lists(st.sampled_from(sorted(optional)), max_size=MOST_ITEMS, unique=True)
    chosen = some.flatmap(lambda names: st.fixed_dictionaries({name: optional[name] for name in names}))
    return st.tuples(fixed, chosen).map(lambda both: {**both[0], **both[1]})
