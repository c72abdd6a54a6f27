"""Sixty JSON schemas after those of public APIs, cut down so that a small model's answers end."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

BOOL: Final[Schema] = {"type": "boolean"}
NULL: Final[Schema] = {"type": "null"}


def text(limit: int = 12, least: int = 0) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": limit}


def word(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def items(schema: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": schema, "minItems": least, "maxItems": most}


def thing(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


SHA: Final = word("^[0-9a-f]{7}$")
DATE: Final[Schema] = {"type": "string", "format": "date"}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
MONEY: Final = thing({"amount": integer(0, 99999), "currency": one_of("EUR", "USD", "JPY")})
POINT: Final = thing({"lat": integer(-90, 90), "lon": integer(-180, 180)})

SCHEMAS: Final[dict[str, Schema]] = {
    "git user": thing({"login": word("^[a-z]{1,8}$"), "id": integer(1, 9999)}, site_admin=BOOL),
    "git commit": thing({"sha": SHA, "message": text(20), "parents": items(thing({"sha": SHA}), 2)}),
    "issue": thing({"number": integer(1, 999), "state": one_of("open", "closed")}, labels=items(text(6), 2)),
    "pull request": thing({"draft": BOOL, "head": thing({"ref": text(8), "sha": SHA}), "merged_at": one_of(None)}),
    "release": thing({"tag_name": word("^v[0-9]{1,2}\\.[0-9]{1,2}$"), "prerelease": BOOL}),
    "workflow run": thing({"status": one_of("queued", "in_progress", "completed"), "attempt": integer(1, 9)}),
    "charge": thing({"object": {"const": "charge"}, "paid": BOOL, "money": MONEY}),
    "refund": thing({"reason": {"anyOf": [one_of("duplicate", "fraudulent"), NULL]}, "amount": integer(1, 500)}),
    "invoice line": thing({"quantity": integer(1, 20), "unit_price": MONEY, "proration": BOOL}),
    "card": thing({"brand": one_of("visa", "amex"), "last4": word("^[0-9]{4}$"), "exp_month": integer(1, 12)}),
    "subscription": thing(
        {
            "interval": one_of("day", "week", "month", "year"),
            "trial_end": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        }
    ),
    "address": thing({"line1": text(10, 1), "postal_code": word("^[0-9]{5}$")}, country=one_of("NO", "JP", "FR")),
    "weather": thing({"city": text(8, 1), "temp": integer(-40, 50), "sky": one_of("clear", "rain", "snow")}),
    "forecast": thing({"days": items(thing({"high": integer(-40, 50), "low": integer(-40, 50)}), 3, 1)}),
    "air quality": thing({"aqi": integer(1, 5), "pm2_5": {"type": "number", "minimum": 0, "maximum": 9}}),
    "chat message": thing({"channel": word("^C[0-9A-Z]{4}$"), "text": text(16), "ts": integer(0, 10**6)}),
    "reaction": thing({"name": one_of("tada", "eyes", "+1"), "count": integer(1, 9)}),
    "chat block": {
        "oneOf": [thing({"type": {"const": "divider"}}), thing({"type": {"const": "header"}, "text": text(8)})]
    },
    "calendar event": thing({"summary": text(12), "start": DATE, "all_day": BOOL}),
    "attendee": thing({"email": word("^[a-z]{1,6}@[a-z]{1,6}\\.org$"), "response": one_of("accepted", "declined")}),
    "free busy": thing({"busy": items(thing({"start": integer(0, 23), "end": integer(0, 23)}), 2)}),
    "mail": thing({"to": items(text(8, 1), 2, 1), "subject": text(12)}, cc=items(text(8, 1), 1)),
    "geo point": thing({"type": {"const": "Point"}, "coordinates": items(integer(-90, 90), 2, 2)}),
    "geo line": thing({"type": {"const": "LineString"}, "coordinates": items(items(integer(0, 9), 2, 2), 3, 2)}),
    "place": thing({"name": text(8, 1), "location": POINT, "open_now": BOOL}),
    "route": thing({"mode": one_of("walk", "bike", "car"), "legs": items(thing({"metres": integer(0, 9999)}), 2, 1)}),
    "flight": thing({"code": word("^[A-Z]{2}[0-9]{3}$"), "gate": {"type": ["string", "null"], "maxLength": 3}}),
    "train": thing({"line": word("^[A-Z][0-9]{1,2}$"), "delay_min": integer(0, 120), "stops": items(text(5, 1), 3)}),
    "container port": thing({"containerPort": integer(1, 65535)}, protocol=one_of("TCP", "UDP", "SCTP")),
    "probe": thing(
        {"httpGet": thing({"path": word("^/[a-z]{1,6}$"), "port": integer(1, 65535)}), "periodSeconds": integer(1, 60)}
    ),
    "resources": thing({"cpu": word("^[0-9]{1,3}m$"), "memory": word("^[0-9]{1,3}(Mi|Gi)$")}),
    "pod phase": thing({"phase": one_of("Pending", "Running", "Failed"), "restarts": integer(0, 9)}),
    "deployment": thing({"replicas": integer(0, 10), "strategy": one_of("RollingUpdate", "Recreate"), "paused": BOOL}),
    "env var": {
        "anyOf": [thing({"name": text(6, 1), "value": text(6)}), thing({"name": text(6, 1), "secretRef": text(6, 1)})]
    },
    "image": thing({"repository": word("^[a-z]{1,8}/[a-z]{1,8}$"), "tag": text(6, 1), "size": integer(0, 10**9)}),
    "security rule": thing({"port": integer(1, 65535), "cidr": word("^[0-9]{1,2}\\.0\\.0\\.0/8$"), "allow": BOOL}),
    "bucket": thing({"name": word("^[a-z0-9]{3,10}$"), "region": one_of("eu-1", "us-1"), "versioned": BOOL}),
    "alarm": thing(
        {"metric": text(8, 1), "threshold": {"type": "number", "minimum": 0, "maximum": 100}, "above": BOOL}
    ),
    "dns record": thing({"type": one_of("A", "MX", "TXT"), "ttl": integer(60, 86400), "content": text(10, 1)}),
    "package": thing({"name": word("^[a-z]{1,8}$"), "version": word("^[0-9]\\.[0-9]\\.[0-9]$"), "private": BOOL}),
    "advisory": thing(
        {"severity": one_of("low", "high", "critical"), "cvss": {"type": "number", "minimum": 0, "maximum": 9}}
    ),
    "track": thing(
        {"name": text(10, 1), "duration_ms": integer(1, 999999), "explicit": BOOL, "popularity": integer(0, 100)}
    ),
    "album": thing({"album_type": one_of("album", "single"), "tracks": items(thing({"n": integer(1, 20)}), 2, 1)}),
    "film": thing({"title": text(10, 1), "year": integer(1900, 2030), "genres": items(one_of("drama", "noir"), 2, 1)}),
    "book": thing({"isbn": word("^97[89][0-9]{10}$"), "pages": integer(1, 2000), "authors": items(text(8, 1), 2, 1)}),
    "recipe": thing({"serves": integer(1, 12), "steps": items(text(10, 1), 2, 1)}, vegan=BOOL),
    "product": thing({"sku": word("^[A-Z]{3}-[0-9]{3}$"), "price": MONEY, "in_stock": BOOL}),
    "cart": thing({"lines": items(thing({"sku": text(5, 1), "n": integer(1, 9)}), 2), "total": MONEY}),
    "review": thing({"stars": integer(1, 5), "verified": BOOL}, title=text(8)),
    "shipment": thing({"carrier": one_of("post", "rail"), "eta": TIME, "delivered": BOOL}),
    "user profile": thing(
        {"name": text(8, 1), "age": integer(0, 120), "email": {"type": ["string", "null"], "maxLength": 8}}
    ),
    "token": thing({"token_type": {"const": "Bearer"}, "expires_in": integer(1, 86400)}, scope=text(8)),
    "problem": thing({"status": one_of(400, 404, 409), "title": text(10, 1)}, detail=text(12)),
    "page": thing({"next": {"anyOf": [word("^[0-9a-f]{4}$"), NULL]}, "data": items(integer(0, 99), 3)}),
    "tree": {
        "$defs": {"node": thing({"id": integer(0, 9)}, next=thing({"id": integer(0, 9)}))},
        **thing({"root": {"$ref": "#/$defs/node"}}),
    },
    "sentiment": one_of("positive", "neutral", "negative"),
    "entities": items(thing({"text": text(6, 1), "label": one_of("PER", "LOC", "ORG")}), 2),
    "quiz": thing({"question": text(10, 1), "options": items(text(4, 1), 3, 2), "answer": integer(0, 2)}),
    "match": thing({"home": integer(0, 9), "away": integer(0, 9), "status": one_of("live", "final")}),
    "matrix": items(items(integer(0, 9), 2, 2), 2, 2),
}
