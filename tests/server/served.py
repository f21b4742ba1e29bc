"""A running server for the tests: a tiny random model or a scripted target, on a free port.

`tiny_llm` is a real `LLM` in int8, whose text does not depend on its company in the batch, so that
a served text can be compared with the library's to the letter. `Scripted` says what a test wants,
as fast as it wants. Neither uses the network beyond the loopback address.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dspark import deepseek_v4_chat
from dspark.drafters.none import NoDrafter
from dspark.engine.engine import Engine
from dspark.engine.lane import InlineLane
from dspark.engine.pipeline import PipelinedEngine
from dspark.grammar import Grammars
from dspark.llm import LLM
from dspark.models.target import Batch, TargetOutput
from dspark.server.app import Settings, create_app
from dspark.server.run import bind
from dspark.server.worker import Model, Worker
from dspark.tokenizer import Tokenizer
from tests.engine.oracle import OracleDrafter, Pattern, ScriptedTarget
from tests.engine.test_pipeline import AheadOracle
from tests.tiny import oracle

EOS = 256
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>\n"
    "{% endfor %}{% endfor %}{{ mood }}"
)
"""In the manner of Qwen's."""


def byte_backend() -> Backend:
    """Ids 0..255 are the bytes, 256 is the end of text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    backend = Backend(models.BPE({c: b for b, c in chars.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<eos>", special=True)])
    return backend


def v4_tokenizer() -> Tokenizer:
    """DeepSeek-V4's chat format over bytes: its marks are text here."""
    chat = deepseek_v4_chat.encoder("preview")
    return Tokenizer(byte_backend(), eos_ids=(EOS,), chat=chat, answers=deepseek_v4_chat.FORMAT)


def tiny_directory(path: Path, template: str = TEMPLATE, **config: Any) -> Path:
    """A tiny random Llama over bytes, as a Hugging Face directory."""
    model = oracle("llama", eos_token_id=EOS, **config)
    with torch.no_grad():
        model.lm_head.weight *= 3
    model.save_pretrained(path)
    byte_backend().save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def tiny_llm(path: Path, max_users: int = 4, max_context: int = 256) -> LLM:
    llm = LLM(
        str(path),
        dtype="int8",
        drafter="ngram",
        threads=1,
        max_context=max_context,
        max_users=max_users,
    )
    llm.model_name = "tiny"
    return llm


class Slow:
    """A target whose passes take a while, as those of a large model do."""

    def __init__(self, inner: ScriptedTarget, seconds: float) -> None:
        self._inner, self.seconds = inner, seconds
        self.vocab_size, self.num_slots = inner.vocab_size, inner.num_slots
        self.max_context, self.device = inner.max_context, inner.device
        self.passes = 0

    def forward(self, batch: Batch, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        time.sleep(self.seconds)
        self.passes += 1
        return self._inner.forward(batch, feature_layers)


class Scripted:
    """Says `text` behind every prompt as long as `prompt`, drafted with `right` tokens right; in
    two `lanes`, of which the second takes half as long for a draft as the first for a pass."""

    def __init__(
        self,
        text: bytes | Sequence[int],
        prompt: bytes = b"hello",
        *,
        right: Pattern | None = None,
        block: int = 5,
        slots: int = 2,
        context: int = 256,
        seconds: float = 0.0,
        tokenizer: Tokenizer | None = None,
        lanes: bool = False,
    ) -> None:
        self.model_name = "scripted"
        plain = Tokenizer(byte_backend(), eos_ids=(EOS,), chat_template=TEMPLATE)
        self.tokenizer = tokenizer or plain
        inner = ScriptedTarget(text, len(prompt), num_slots=slots, max_context=context)
        self.target = Slow(inner, seconds)
        if right is None:
            self.drafter_name = "none"
            drafter: Any = NoDrafter(self.target)
        else:
            self.drafter_name = "oracle"
            drafter = OracleDrafter({tuple(prompt): tuple(text)}, block, right)
        self.engine = Engine(self.target, drafter, self.tokenizer)
        if lanes and right is not None:
            ahead = AheadOracle({tuple(prompt): tuple(text)}, block + 1, right)
            lane = InlineLane(ahead, pad_ms=seconds * 500)
            self.engine = PipelinedEngine(self.target, lane, self.tokenizer, cap=block)

    @property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.target.vocab_size)

    def plain_speed(self) -> float:
        return 50.0

    def encode_prompt(self, prompt: Any, raw: bool = False, **options: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        return tuple(self.tokenizer.encode_chat(prompt, **options))


@dataclass
class Running:
    """A server that answers."""

    url: str
    worker: Worker
    http: httpx.Client
    client: openai.OpenAI
    key: str

    def async_client(self) -> openai.AsyncOpenAI:
        """To be closed by who asks for it."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def series(self, name: str) -> float:
        """The sum of a series of /metrics over its labels."""
        page = self.http.get("/metrics").text
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", page, re.MULTILINE)
        assert found, f"{name} is not in:\n{page}"
        return sum(float(v) for v in found)

    def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> float:
        """Wait until `condition` holds; how long that took."""
        begun = time.perf_counter()
        while not condition():
            assert time.perf_counter() - begun < seconds, "it never came"
            time.sleep(0.005)
        return time.perf_counter() - begun

    def idle(self) -> None:
        """Wait until nothing is in flight, and see that nothing was left."""
        self.wait(lambda: self.worker.open_requests == 0)
        engine = self.worker.ready().engine
        self.wait(lambda: not engine.has_work)
        assert len(engine._slots.free) == engine.target.num_slots
        assert not engine._outputs and not engine._arrived


@contextmanager
def serving(
    load: Callable[[], Model] | Model, *, ready: bool = True, **settings: Any
) -> Iterator[Running]:
    """Run a server around a model, or around what loads one."""
    chosen = Settings(**settings)
    app = create_app(load if callable(load) else (lambda: load), chosen)
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"Authorization": f"Bearer {chosen.api_key}"} if chosen.api_key else {}
    key = chosen.api_key or "none"
    with (
        httpx.Client(base_url=url, headers=headers, timeout=60) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        running = Running(url, app.state.worker, http, client, key)
        running.wait(lambda: server.started)
        if ready:
            running.wait(lambda: running.worker.model is not None, 60)
        try:
            yield running
        finally:
            server.should_exit = True
            thread.join(15)
            assert not thread.is_alive()
            listener.close()
            assert running.worker.join(0)
