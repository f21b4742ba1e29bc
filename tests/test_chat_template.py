"""Chat templates: found where models keep them, run as `transformers` runs them, in a sandbox."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dspark.errors import CheckpointError, InvalidRequestError
from dspark.tokenizer import Tokenizer
from tests.test_tokenizer import directory

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "<a> & 'é' \"q\"", "extra": {"k": [1, None, True]}},
    {"role": "assistant", "content": " two\nlines "},
]
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "plain": LOOP + "{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "blocks": "{% if messages %}\n    {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n"
    "{% endif %}\nx\n",
    "prompt": "{{ bos_token }}{% if add_generation_prompt %}GO{% endif %}",
    "json": LOOP + "{{ m | tojson }}|{{ [m] | tojson(indent=2) }}{% endfor %}",
    "sorted json": LOOP + "{{ m | tojson(sort_keys=true, separators=(',', ':')) }}{% endfor %}",
    "break": LOOP + "{{ m.content }}{% break %}{% endfor %}",
    "generation": LOOP + "{% if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }}"
    "{% set x = 1 %}{% endgeneration %}\n{% endif %}{{ x is defined }}{% endfor %}",
    "nothing given": "{{ tools is none }}{{ documents is none }}{{ other is defined }}",
    "namespace": "{% set n = namespace(c=0) %}" + LOOP + "{% set n.c = n.c + 1 %}{% endfor %}"
    "{{ n.c }}",
    "slices": "{{ messages[1:] | length }}{{ messages[0].content.split(' ')[0] }}",
}  # fmt: skip


def with_template(path: Path, template: Any) -> Tokenizer:
    return Tokenizer.from_directory(directory(path, chat_template=template))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(tmp_path: Path, name: str, prompt: bool) -> None:
    ours = with_template(tmp_path, TEMPLATES[name])
    oracle: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=TEMPLATES[name],
    )
    expected = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    assert ours.encode_chat(CHAT, add_generation_prompt=prompt) == ours.encode(expected)


@pytest.mark.parametrize(
    ("template", "options", "tools"),
    [
        ("{{ messages }}{{ bos_token }}{{ add_generation_prompt }}", set(), False),
        ("{% for t in tools %}{{ raise_exception(t) }}{% endfor %}", {"tools"}, False),
        ("{% for t in tools %}<tool_call>{{ t }}{% endfor %}{{ mood }}", {"tools", "mood"}, True),
        ("{% set x = 1 %}{{ range(x) }}<tool_call>{{ strftime_now('') }}", set(), False),
    ],
)
def test_what_a_template_reads(
    tmp_path: Path, template: str, options: set[str], tools: bool
) -> None:
    """Neither its own names nor those of the sandbox; tools only where calls can be read."""
    path = directory(tmp_path, chat_template=template, bos_token="<bos>")
    ours = Tokenizer.from_directory(path)
    assert (ours.chat_options, ours.knows_tools) == (options, tools)


def test_variables_reach_the_template(tmp_path: Path) -> None:
    ours = with_template(tmp_path, "{{ enable_thinking }} {{ tools | length }} {{ eos_token }}")
    text = ours.apply_chat_template(CHAT, enable_thinking=False, tools=[1, 2], eos_token="E")
    assert text == "False 2 E"


def test_the_date(tmp_path: Path) -> None:
    ours = with_template(tmp_path, "{{ strftime_now('%Y') }}")
    assert abs(int(ours.apply_chat_template(CHAT)) - datetime.datetime.now().year) <= 1


def test_messages_are_not_changed(tmp_path: Path) -> None:
    ours = with_template(tmp_path, "{% set _ = messages[0].update({'role': 'x'}) %}")
    before = json.dumps(CHAT)
    with pytest.raises(InvalidRequestError):  # the sandbox has immutable objects
        ours.apply_chat_template(CHAT)
    assert json.dumps(CHAT) == before


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"config": "one"}, "one"),
        ({"config": [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]},
         "yes"),
        ({"config": "one", "file": "two"}, "two"),
        ({"file": "two"}, "two"),
    ],
)  # fmt: skip
def test_where_templates_are(tmp_path: Path, places: dict[str, Any], expected: str) -> None:
    directory(tmp_path, **({"chat_template": places["config"]} if "config" in places else {}))
    if "file" in places:
        (tmp_path / "chat_template.jinja").write_text(places["file"])
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(CHAT) == expected


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "rag", "template": "no"}]}])
def test_no_template(tmp_path: Path, config: dict[str, Any]) -> None:
    ours = Tokenizer.from_directory(directory(tmp_path, **config))
    for call in (ours.apply_chat_template, ours.encode_chat):
        with pytest.raises(InvalidRequestError, match=r"no chat template: .*--raw"):
            call(CHAT)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages[7].content }}", "refused the messages"),
        ("{{ messages[0].content | int / 0 }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages.*__class__"),
        ("{{ messages.append(1) }}", "refused the messages"),
    ],
)
def test_refusals(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        with_template(tmp_path, template).apply_chat_template(CHAT)


def test_damaged_template(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template is damaged"):
        with_template(tmp_path, "{% if %}").apply_chat_template(CHAT)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {}, "hello", None])
def test_messages_need_role_and_content(tmp_path: Path, message: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a message needs role and content"):
        with_template(tmp_path, "x").apply_chat_template([message])
