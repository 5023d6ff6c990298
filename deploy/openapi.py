"""The OpenAPI document of the gateway, from the very types that requests are parsed into. Pure.

FastAPI makes it of the routes; what their bodies are it cannot know, because they are read by `json_bodies`.
"""

from __future__ import annotations

from typing import Any

import msgspec

REFERENCE = "#/components/schemas/{name}"


def body_of(*kinds: type) -> dict[str, Any]:
    """For a route's `openapi_extra`: its body is one of these."""
    references = [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def with_schemas(document: dict[str, Any], kinds: tuple[type, ...], model: str) -> dict[str, Any]:
    """The document, with the schemas of these types and of whatever they contain. `model`: the one that is served,
    the only one that a request may name."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    for kind in kinds:
        named = schemas[kind.__name__]["properties"].get("model", {})
        for shape in named.get("anyOf", [named]):
            if shape.get("type") == "string":
                shape["enum"] = [model]
    components = document.get("components", {})
    return document | {"components": components | {"schemas": components.get("schemas", {}) | schemas}}
