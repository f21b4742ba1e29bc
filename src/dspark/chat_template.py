"""Chat templates: the Jinja text by which a model's conversations are written, in a sandbox.

A template is a program of strangers. It may loop and format; it reaches nothing outside.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

from dspark.errors import CheckpointError


@functools.cache
def compiled(template: str) -> Any:
    """The template in a sandbox, with the functions that Hugging Face's templates expect. Raises
    CheckpointError for what is none."""
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it only groups."""

        tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)  # jinja's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as e:
        raise CheckpointError(f"the model's chat template is damaged: {e}") from e


def variables(template: str) -> frozenset[str]:
    """The names that a template reads, and neither it nor the sandbox sets. Raises
    CheckpointError."""
    from jinja2 import meta

    environment = compiled(template).environment
    found = meta.find_undeclared_variables(environment.parse(template))
    return frozenset(found - set(environment.globals))
