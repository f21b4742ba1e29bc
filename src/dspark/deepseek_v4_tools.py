"""Tools in DeepSeek-V4's conversations: how they are offered, called, and how results come back.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Each argument is an element of its own: with string="true" its text as it stands, without quotes or
escapes, otherwise JSON. Calls stand behind the content, an empty line between. The paragraph that
explains this to the model is part of the format: it was trained on these very words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark.answers import Call, CallReader, Step, Tool, overlap, read_json
from dspark.errors import InvalidRequestError
from dspark.tool_calls import json_rule, literal

DSML = "｜DSML｜"
OPEN, CLOSE = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
END_INVOKE, END_PARAMETER = f"</{DSML}invoke>", f"</{DSML}parameter>"
INVOKE = f'<{DSML}invoke name="'
_OFFER = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by\
 writing a "{OPEN}" block like the following:

{OPEN}
{INVOKE}$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{END_PARAMETER}
...
{END_INVOKE}
{INVOKE}$TOOL_NAME2">
...
{END_INVOKE}
{CLOSE}

String parameters should be specified as is and set `string="true"`. For all other types (numbers,\
 booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside\
 <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_PARAMETER = f'<{DSML}parameter name="'
_CALLED = re.compile(rf'\s*{INVOKE}([^"]*)">')
_ENDED = re.compile(rf"\s*{END_INVOKE}")
_NAMED = re.compile(rf'\s*{_PARAMETER}([^"]*)"')
_TEXT, _AS_JSON = ' string="true">', ' string="false">'
_CLOSED = re.compile(rf"\s*{CLOSE}")
_ROOT = frozenset({
    "type", "properties", "required", "additionalProperties", "patternProperties",
    "unevaluatedProperties", "$defs", "definitions", "$schema", "$id", "$comment", "title",
    "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
})  # fmt: skip
"""Of a schema of arguments: what can be held with one element for each property."""
_SPELLED = frozenset({
    "type", "enum", "const", "title", "description", "default", "examples", "deprecated", "$defs",
    "definitions",
})  # fmt: skip
"""Of a string: any text fits, or one of a few."""


def offer(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says of tools, given in OpenAI's form or as the function alone."""
    return _OFFER % "\n".join(_json(t.get("function", t)) for t in tools)


def written(calls: Sequence[Any]) -> str:
    """An assistant's calls as the model writes them, the empty line in front included.

    `calls` in OpenAI's form; arguments are a mapping or the text of a JSON object. Raises
    InvalidRequestError for what is no call.
    """
    return f"\n\n{OPEN}\n" + "\n".join(map(_invocation, calls)) + f"\n{CLOSE}"


def _invocation(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("a call in tool_calls needs a function with name and arguments")
    given = function.get("arguments") or {}
    arguments = read_json(given) if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            f"the arguments of {function['name']} in tool_calls are no JSON object"
        )
    lines = []
    for name, value in arguments.items():
        kind, raw = ("true", value) if isinstance(value, str) else ("false", _json(value))
        lines.append(f'<{DSML}parameter name="{name}" string="{kind}">{raw}{END_PARAMETER}')
    return "\n".join([f'{INVOKE}{function["name"]}">', "\n".join(lines), END_INVOKE])


def result(content: str) -> str:
    """What a tool returned."""
    return f"<tool_result>{content}</tool_result>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Dsml:
    """Fulfils `answers.CallSyntax`."""

    openings = ("\n\n" + OPEN, OPEN)
    tokens = frozenset({DSML})

    def reader(self, names: Collection[str]) -> CallReader:
        """See `answers.CallSyntax.reader`."""
        return _DsmlCalls(names)

    def rules(self, tools: Sequence[Tool], parallel: bool) -> str:
        """See `answers.CallSyntax.rules`. Arguments come in the order of their properties; strings
        with a pattern or a length are written as JSON, which the format allows, too."""
        lines = [f"raw[lazy]: ANY {literal(END_PARAMETER)}"]
        each = []
        for n, tool in enumerate(tools):
            parts = []
            for k, (name, optional, value) in enumerate(_properties(tool)):
                head = f'<{DSML}parameter name="{name}" string='
                lines.append(f"p{n}_{k}: {_element(head, value)}")
                parts.append(f"p{n}_{k}{'?' if optional else ''}")
            head, end = literal(f'{INVOKE}{tool.name}">\n'), literal(END_INVOKE + "\n")
            each.append(" ".join([head, *parts, end]))
        more = "+" if parallel else ""
        lines += [f'calls: "\\n" call{more} {literal(CLOSE)}', "call: " + "\n  | ".join(each)]
        return "\n".join(lines) + "\n"


DSML_SYNTAX = Dsml()


class _DsmlCalls:
    """Fulfils `answers.CallReader`.

    The JSON of the arguments is put together here. A text is told as it is written; a value that is
    written as JSON in one piece, since only its end says whether it is JSON.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._in_call = self._in_text = False
        self._given: set[str] = set()
        """Names of the arguments so far."""

    def step(self, text: str) -> Step | None:
        """See `answers.CallReader.step`."""
        if self._in_text:
            return self._text(text)
        if self._in_call:
            return self._element(text)
        if closed := _CLOSED.match(text):
            return Step(closed.end(), closed=True)
        head = _CALLED.match(text)
        if head is None:
            return _awaited(text, INVOKE, CLOSE)
        if head[1] not in self._names:
            return None
        self._given = set()
        first = self._element(text[head.end() :])
        if first is None or first.call is None:
            return first
        return Step(head.end() + first.length, Call(head[1], "{" + first.call.arguments))

    def _element(self, text: str) -> Step | None:
        """An argument, or the beginning of one that is a text, or the end of the call."""
        if ended := _ENDED.match(text):
            self._in_call = False
            return Step(ended.end(), Call("", "}"))
        named = _NAMED.match(text)
        if named is None:
            return _awaited(text, _PARAMETER, END_INVOKE)
        name, rest = named[1], text[named.end() :]
        if name in self._given:
            return None
        key = f"{', ' if self._given else ''}{_json(name)}: "
        if rest.startswith(_TEXT):
            self._in_text = True
            step = Step(named.end() + len(_TEXT), Call("", key + '"'))
        elif rest.startswith(_AS_JSON):
            raw, end, _ = rest[len(_AS_JSON) :].partition(END_PARAMETER)
            if not end:
                return Step()
            value = read_json(raw)
            if value is ...:
                return None
            length = named.end() + len(_AS_JSON) + len(raw) + len(end)
            step = Step(length, Call("", key + _json(value)))
        else:
            return Step() if any(k.startswith(rest) for k in (_TEXT, _AS_JSON)) else None
        self._given.add(name)
        self._in_call = True
        return step

    def _text(self, text: str) -> Step:
        """More of an argument that is a text, and its end."""
        raw, end, _ = text.partition(END_PARAMETER)
        if not end:
            raw = text[: len(text) - overlap(text, (END_PARAMETER,))]
        self._in_text = not end
        escaped = _json(raw)[1:-1] + ('"' if end else "")
        return Step(len(raw) + len(end), Call("", escaped))


def _awaited(text: str, *marks: str) -> Step | None:
    """Nothing yet, if `text` may become one of the marks."""
    head = text.lstrip()
    return Step() if any(head[: len(m)] == m[: len(head)] for m in marks) else None


def _properties(tool: Tool) -> list[tuple[str, bool, Any]]:
    """Name, whether it may be left out, and schema of each argument."""
    schema = tool.parameters
    properties, required = schema.get("properties", {}), schema.get("required", [])
    unknown = sorted(set(schema) - _ROOT)
    missing = [r for r in required if r not in properties]
    bad = [p for p in properties if '"' in p]
    refs = [r for r in _refs(properties) if not r.startswith(("#/$defs/", "#/definitions/"))]
    if unknown or missing or bad or refs:
        what = ", ".join([*unknown, *missing, *bad, *refs])
        raise InvalidRequestError(f"the parameters of {tool.name} cannot be held to {what[:200]}")
    shared = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    out = []
    for name, value in properties.items():
        if value is False and name not in required:
            continue
        held = {**value, **shared} if isinstance(value, Mapping) and shared else value
        out.append((name, name not in required, held))
    return out


def _element(head: str, schema: Any) -> str:
    """One argument behind `head`, in Lark's notation."""
    plain, end = literal(f'{head}"true">'), literal(END_PARAMETER + "\n")
    keys = set(schema) if isinstance(schema, Mapping) else set()
    if isinstance(schema, Mapping) and not keys - _SPELLED:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        texts = isinstance(values, list) and all(
            isinstance(v, str) and END_PARAMETER not in v for v in values
        )
        if values and texts and schema.get("type", "string") == "string" and "" not in values:
            return f"{plain} ({' | '.join(map(literal, values))}) {end}"
        if values is None and schema.get("type") == "string":
            return f'{plain} raw "\\n"'
    as_json = literal(f'{head}"false">')
    return f"{as_json} {json_rule(schema)} {end}"


def _refs(value: Any) -> list[str]:
    """Where the references in a schema point."""
    if isinstance(value, Mapping):
        here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return here + [r for v in value.values() for r in _refs(v)]
    return [r for v in value for r in _refs(v)] if isinstance(value, list) else []
