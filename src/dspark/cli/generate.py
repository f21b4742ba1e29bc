"""`dspark generate`: one prompt, one answer, and how the drafter helped.

The answer streams to standard output, the draft tokens that the target accepted in green. All else
goes to standard error: what was resolved and why, a legend, the statistics, the trace.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options as opt
from dspark.cli import ui
from dspark.cli.trace import prefill_line, trace_line
from dspark.errors import ConfigError, InvalidRequestError
from dspark.types import SamplingParams

if TYPE_CHECKING:
    from dspark.llm import LLM
    from dspark.types import Chunk, Output, Round

EPILOG = """Examples:

  dspark generate "Write a haiku about rain." --temperature 0.7 --seed 1

  cat article.txt | dspark generate - --system "Summarise the text." --trace
"""

DEFAULT = SamplingParams()


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The user's message; - reads standard input.", show_default=False),
    ] = None,
    model: opt.ModelOption = "default",
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            help="'auto', or a name; a wrong one lists them.",
            rich_help_panel=opt.MODEL_PANEL,
        ),
    ] = "auto",
    num_draft_tokens: opt.NumDraftTokensOption = None,
    verify: opt.VerifyOption = "auto",
    pipeline: opt.PipelineOption = "auto",
    draft_device: opt.DraftDeviceOption = None,
    emulate_device: opt.EmulateOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt as it is: no chat template.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate at most.", rich_help_panel=opt.SAMPLING_PANEL)
    ] = DEFAULT.max_tokens,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "--temp", help="0 is greedy.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.temperature,
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the most probable tokens of this mass.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.top_p,
    top_k: Annotated[
        int,
        typer.Option(
            help="Keep this many most probable tokens; 0 keeps all.",
            rich_help_panel=opt.SAMPLING_PANEL,
        ),
    ] = DEFAULT.top_k,
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the most probable one.",
            rich_help_panel=opt.SAMPLING_PANEL,
        ),
    ] = DEFAULT.min_p,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same text.", show_default="random", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.seed,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the text before this string; may be given again.",
            show_default=False,
            rich_help_panel=opt.SAMPLING_PANEL,
        ),
    ] = None,
    min_tokens: Annotated[
        int,
        typer.Option(help="No end before this many tokens.", rich_help_panel=opt.SAMPLING_PANEL),
    ] = DEFAULT.min_tokens,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Do not end at end-of-text.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.ignore_eos,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The answer is JSON that fits this schema; {} lets any JSON through.",
            show_default=False,
            rich_help_panel=opt.SAMPLING_PANEL,
        ),
    ] = None,
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Subtracted from tokens generated before.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.presence_penalty,
    frequency_penalty: Annotated[
        float,
        typer.Option(help="The same, once per occurrence.", rich_help_panel=opt.SAMPLING_PANEL),
    ] = DEFAULT.frequency_penalty,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Divides the logits of tokens seen; 1 is off.", rich_help_panel=opt.SAMPLING_PANEL
        ),
    ] = DEFAULT.repetition_penalty,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities, with this many alternatives.",
            show_default=False,
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = DEFAULT.logprobs,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object.", rich_help_panel=opt.OUTPUT_PANEL),
    ] = False,
    no_stream: Annotated[
        bool,
        typer.Option(
            "--no-stream", help="Print the answer when done.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="A line for each round on standard error, the answer behind them.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = False,
    color: Annotated[
        ui.Color,
        typer.Option(
            help="'auto': on a terminal, and without NO_COLOR.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = ui.Color.auto,
) -> None:
    """Answer one prompt, streaming; what the drafter guessed right is green."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        min_tokens=min_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs shows nothing without --json: add it")
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw turns off: drop one")
    text = _read_prompt(prompt)
    schema = None if json_schema is None else _read_schema(json_schema)
    llm = opt.load_llm(
        model,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        verify=verify,
        pipeline=pipeline,
        draft_device=draft_device,
        emulate=emulate_device,
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
    )
    if schema is not None:
        params = replace(params, grammar=llm.json_grammar(schema))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    _answer(llm, text if raw else messages, params, color, as_json, trace, no_stream)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give one, or - to read standard input", param_hint="PROMPT")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"standard input is not UTF-8 text: {error}") from error
        # `echo` and editors end a text with a newline that nobody means.
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise InvalidRequestError("the prompt is empty: give some text")
    return prompt


def _read_schema(file: Path) -> dict[str, Any]:
    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json-schema {file} is no JSON file: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--json-schema {file} holds no object: a JSON schema is one")
    return schema


def _answer(
    llm: LLM,
    prompt: str | list[dict[str, str]],
    params: SamplingParams,
    color: ui.Color,
    as_json: bool,
    trace: bool,
    no_stream: bool,
) -> None:
    out = ui.Paint(not as_json and ui.wants_color(color, sys.stdout))
    err = ui.Paint(ui.wants_color(color, sys.stderr))
    ui.note(err.muted(ui.resolved_line(llm)))
    if out.on:
        ui.note(f"{err.accepted('drafted and accepted')} · the target's own")

    def text_of(token: int) -> str:
        return llm.tokenizer.decode([token], skip_special=False)

    def on_round(r: Round) -> None:
        ui.note(trace_line(r, text_of, err))

    chunks: list[Chunk] = []
    held = as_json or trace or no_stream
    try:
        for chunk in llm.stream(prompt, params, on_round=on_round if trace else None):
            if trace and not chunks:
                ui.note(prefill_line(chunk.token, text_of, err))
            chunks.append(chunk)
            if not held:
                _write(chunk, out)
    except KeyboardInterrupt:
        if not held:
            sys.stdout.write("\n")  # the shell's next line shall not begin behind the answer
        raise
    output = llm.last_output
    assert output is not None  # the stream ran to its end
    if as_json:
        found = _as_json(llm, output, chunks)
        print(json.dumps(ui.finite(found), ensure_ascii=False, allow_nan=False))
    else:
        if held:
            for chunk in chunks:
                _write(chunk, out)
        sys.stdout.write("\n")
        sys.stdout.flush()
    ui.note(err.muted(ui.stats_line(output.stats, llm.drafter_name)))
    for message in llm.messages:
        ui.note(f"warning: {message}")


def _write(chunk: Chunk, paint: ui.Paint) -> None:
    sys.stdout.write(paint.accepted(chunk.text) if chunk.drafted else chunk.text)
    sys.stdout.flush()


def _as_json(llm: LLM, output: Output, chunks: list[Chunk]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "drafted": [c.drafted for c in chunks],
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_ids),
        "stats": ui.stats_json(output.stats),
        "model": llm.model_name,
        "dtype": llm.dtype,
        "device": llm.device,
        "threads": llm.threads,
        "drafter": llm.drafter_name,
        "verify": llm.verify,
    }
    if output.logprobs is not None:
        found["logprobs"] = [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "top": [{"token": t, "logprob": p} for t, p in entry.top],
            }
            for entry in output.logprobs
        ]
    return found
