"""The OpenAPI document against the server: it is correct and complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.openai.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from pinyon.openai.openapi import openapi_document
from pinyon.openai.parse import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from tests.integration.lb_harness import MODEL, Connection, running_lb

DOCUMENT = json.loads(openapi_document())
SCHEMAS = DOCUMENT["components"]["schemas"]
CHECKPOINT = Path(__file__).parents[1] / "data" / "golden_text" / "llama-bytes-bos"
HI = [{"role": "user", "content": "hi"}]

REQUESTS = {
    "CompletionRequest": (COMPLETION, parse_completion, {"model": MODEL, "prompt": "a", "echo": True}),
    "ChatRequest": (CHAT, parse_chat, {"model": MODEL, "messages": HI, "logprobs": True}),
    "TokenizeRequest": (TOKENIZE, parse_tokenize, {"prompt": "a"}),
    "DetokenizeRequest": (DETOKENIZE, parse_detokenize, {"tokens": [97]}),
}
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
KNOWN = {
    "type", "enum", "const", "anyOf", "$ref", "properties", "required", "additionalProperties", "maxProperties",
    "items", "minItems", "maxItems", "minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength",
}  # fmt: skip


def faults(value, schema: dict, at: str = "$") -> list[str]:
    """Returns how a value violates a schema; a keyword that is not handled here is a fault of the document."""
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    if "$ref" in schema:
        return faults(value, SCHEMAS[schema["$ref"].removeprefix("#/components/schemas/")], at)
    if "anyOf" in schema:
        found = [faults(value, each, at) for each in schema["anyOf"]]
        return [] if not all(found) else min(found, key=len)
    if "enum" in schema:
        fits = any(value == each and type(value) is type(each) for each in schema["enum"])
        return [] if fits else [f"{at}: {value!r} is not in {schema['enum']}"]
    if "const" in schema:
        return [] if value == schema["const"] else [f"{at}: {value!r}"]
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (type(value) is bool) != (kind == "boolean")):
        return [f"{at}: {value!r} is no {kind}"]
    wrong: list[str] = []
    if kind == "object":
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", {})
        wrong += [f"{at}: no {name}" for name in schema.get("required", ()) if name not in value]
        wrong += [f"{at}: {name} is not known" for name in value if name not in known and rest is False]
        wrong += [f"{at}: too many"] * (len(value) > schema.get("maxProperties", len(value)))
        for name, each in value.items():
            wrong += faults(each, known.get(name, rest or {}), f"{at}.{name}")
    elif kind == "array":
        wrong += [f"{at}: length"] * (not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
        for index, each in enumerate(value):
            wrong += faults(each, schema.get("items", {}), f"{at}[{index}]")
    elif kind == "string":
        wrong += [f"{at}: length"] * (not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30))
    elif kind in ("integer", "number"):
        low, above, high = (schema.get(name, value) for name in ("minimum", "exclusiveMinimum", "maximum"))
        wrong += [f"{at}: {value!r}"] * (not low <= value <= high or ("exclusiveMinimum" in schema and value <= above))
    return wrong


def examples(schema: dict) -> list:
    """Returns values that the schema allows, its bounds among them."""
    if "anyOf" in schema:
        return [value for each in schema["anyOf"] for value in examples(each)]
    if "enum" in schema:
        return schema["enum"]
    match schema["type"]:
        case "string":
            return ["a"]
        case "boolean":
            return [True, False]
        case "null":
            return [None]
        case "integer" | "number":
            low = schema["minimum"] if "minimum" in schema else schema["exclusiveMinimum"] + 0.5
            return [low, schema["maximum"]]
        case "array":
            items = examples(schema["items"])
            most = schema.get("maxItems", 3)
            return [items[:1] * most] + ([[]] if not schema.get("minItems") else [])
        case "object":
            properties = schema.get("properties", {})
            full = {name: examples(each)[0] for name, each in properties.items()}
            if isinstance(schema.get("additionalProperties"), dict):
                full = {"5": examples(schema["additionalProperties"])[0]}
            return [full] if schema.get("required") else [full, {}]
    raise AssertionError(schema)


@pytest.mark.parametrize("name", REQUESTS)
def test_fields_are_accepted_exactly_where_they_are_documented(name):
    fields, parse, base = REQUESTS[name]
    properties = SCHEMAS[name]["properties"]
    assert properties.keys() == fields.keys()
    for field, schema in properties.items():
        tried = 0
        for value in examples(schema):
            body = {**base, field: value}
            if field == "messages" and "prompt" in base:
                del body["prompt"]
            if field in ("prompt", "messages") and value is None:
                continue
            if field in ("stream_options", "stream"):
                body["stream"] = True
            if field == "best_of" and value is not None:
                body["n"] = value
            if field == "continue_final_message" and value:
                body["add_generation_prompt"] = False
            if field == "add_special_tokens" and value and "messages" in body:
                continue
            if field == "max_completion_tokens":
                body.pop("max_tokens", None)
            assert not faults(body, SCHEMAS[name])
            parse(json.dumps(body).encode())
            tried += 1
        assert tried


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_not_documented_is_refused(name):
    """Both the schema and the server refuse it; the server's message names bounds."""
    fields, parse, base = REQUESTS[name]
    for field in fields:
        for value in ({"no": "such"}, -1e9, "no such"):
            body = {**base, field: value}
            if field == "messages":
                body.pop("prompt", None)
            wrong = faults(body, SCHEMAS[name])
            if not wrong:
                continue
            with pytest.raises(InvalidArgument, match=re.escape(field)):
                parse(json.dumps(body).encode())


async def test_each_documented_route_answers_as_documented():
    async with running_lb() as bench:
        served = (await bench.get("/openapi.json")).json
        assert served == DOCUMENT
        assert len(openapi_document()) < 64 << 10
        of_servers = {"/v1/*"}
        assert {path.replace("{id}", "*") for path in DOCUMENT["paths"]} == set(bench.lb.app.places) - of_servers
        for path, methods in DOCUMENT["paths"].items():
            target = path.replace("{id}", MODEL)
            for method, operation in methods.items():
                answers = operation["responses"]["200"]["content"]
                if method == "get":
                    reply = await bench.get(target)
                    assert reply.status == 200
                    if "application/json" in answers:
                        assert not faults(reply.json, answers["application/json"]["schema"])
                name = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                if method == "post":
                    request = name["schema"]["$ref"].rpartition("/")[2]
                    base = {**REQUESTS[request][2], **({"max_tokens": 2, "logprobs": None} if "v1" in path else {})}
                    reply = await bench.post(target, base)
                    assert reply.status == 200, path
                    assert not faults(reply.json, answers["application/json"]["schema"])
            async with Connection(bench.http) as connection:
                connection.send("PATCH", target)
                reply = await connection.reply()
                assert reply.status == 405
                assert not faults(reply.json, SCHEMAS["Error"])
        await bench.idle()


def test_the_fields_of_the_version_have_types():
    assert SCHEMAS["Version"]["properties"] == {
        "version": {"type": "string"},
        "compiled": {"type": "boolean"},
        "python": {"type": "string"},
    }


async def test_ready_for_one_model_of_two_is_as_documented():
    async with running_lb(more_models=f"other={CHECKPOINT}") as bench:
        reply = await bench.get("/health/ready")
        assert (reply.status, list(reply.json["lacks"])) == (200, ["other"])
        schema = DOCUMENT["paths"]["/health/ready"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert not faults(reply.json, schema)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 2},
        {"logprobs": 2},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2, "logprobs": 1},
    ],
)
async def test_answers_fit_their_schemas(extra):
    async with running_lb() as bench:
        for path, body in (
            ("/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 3, **extra}),
            ("/v1/completions", {"model": MODEL, "prompt": ["ab", "c"], "max_tokens": 3, "echo": True, **extra}),
            ("/v1/chat/completions", {"model": MODEL, "messages": HI, "max_tokens": 3, **extra}),
        ):
            if "messages" in body and "logprobs" in extra:
                body |= {"logprobs": True, "top_logprobs": extra["logprobs"]}
            answers = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
            whole = {name: value for name, value in body.items() if name != "stream_options"}
            reply = await bench.post(path, whole, {"x-pinyon-report": "1"})
            assert not faults(reply.json, answers["application/json"]["schema"])
            reply = await bench.post(path, {**body, "stream": True}, {"x-pinyon-report": "1"})
            assert reply.events[-1] == "[DONE]"
            for event in reply.events[:-1]:
                assert not faults(json.loads(event), answers["text/event-stream"]["schema"]), event
