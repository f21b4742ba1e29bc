"""`dspark serve`: the model behind an OpenAI-compatible HTTP server.

The port opens at once; the model loads behind it. What was resolved and the log go to standard
error. Ctrl-C ends it, with exit code 0.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options as opt
from dspark.cli import ui
from dspark.errors import ResourceError

if TYPE_CHECKING:
    from dspark.llm import LLM

EPILOG = """Examples:

  dspark serve --port 8000

  dspark serve Qwen/Qwen3-0.6B --drafter ngram --max-users 4 --api-key secret
"""

SERVER_PANEL = "Server"


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Target: a name, a directory or a GGUF file; 'default' is SmolLM2-135M-Instruct."
        ),
    ] = "default",
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 is every network.", rich_help_panel=SERVER_PANEL
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=SERVER_PANEL),
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="DSPARK_API_KEY",
            help="Clients must send it as a bearer token; also from DSPARK_API_KEY.",
            show_default="no key",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="Name under which clients ask for the model.",
            show_default="the model's own",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    max_users: Annotated[
        int,
        typer.Option(min=1, help="Texts generated at once.", rich_help_panel=SERVER_PANEL),
    ] = 8,
    max_queue: Annotated[
        int,
        typer.Option(
            min=0, help="Texts that may wait; more get status 429.", rich_help_panel=SERVER_PANEL
        ),
    ] = 64,
    max_body: Annotated[
        int,
        typer.Option(min=1, help="Largest request, in KiB.", rich_help_panel=SERVER_PANEL),
    ] = 4096,
    metrics_prefix: Annotated[
        str,
        typer.Option(
            help="Of /metrics; 'vllm' fits dashboards that exist.", rich_help_panel=SERVER_PANEL
        ),
    ] = "dspark",
    log_interval: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds between lines of figures.", rich_help_panel=SERVER_PANEL
        ),
    ] = 10.0,
    no_prefix_reuse: Annotated[
        bool,
        typer.Option(
            "--no-prefix-reuse",
            help="Run every prompt whole, also where an earlier text began alike.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
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
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = None,
    max_context: opt.MaxContextOption = None,
) -> None:
    """Serve the model over HTTP with OpenAI's protocol."""
    try:
        from dspark.server.app import Settings
        from dspark.server.run import bind
        from dspark.server.run import serve as run
    except ImportError as e:
        raise ResourceError(
            f"{e.name} is missing, which the server needs: pip install 'dspark[serve]'"
        ) from e

    def load() -> LLM:
        from dspark.llm import LLM

        llm = LLM(
            model,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            verify=verify,
            pipeline=pipeline,
            draft_device=draft_device,
            dtype=dtype,
            device=device,
            threads=threads,
            max_context=max_context,
            max_users=max_users,
            prefix_reuse=not no_prefix_reuse,
        )
        ui.note(ui.resolved_line(llm))
        if served_model_name is not None:
            llm.model_name = served_model_name
        return llm

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings(
        api_key=api_key or None,
        model_names=() if served_model_name is not None else (model,),
        max_queue=max_queue,
        max_body=max_body * 1024,
        metrics_prefix=metrics_prefix,
        log_interval=log_interval,
    )
    listener = bind(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}/v1"
    if not api_key and host not in ("127.0.0.1", "localhost", "::1"):
        ui.note(f"warning: everybody who can reach {host} can use this server: set --api-key")
    ui.note(f"serving at {url} · loading {model} · Ctrl-C ends")
    run(load, settings, listener, on_ready=lambda _: ui.note("ready"))
