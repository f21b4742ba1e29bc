"""Options that several verbs share, and the one place where the command line loads a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dspark.llm import LLM

MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling"
OUTPUT_PANEL = "Output"

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Target: a name, a directory or a GGUF file; 'default' is SmolLM2-135M-Instruct.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Arithmetic of the target's weights; 'auto' takes the fastest that fits.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="'auto', 'cpu' or 'cuda'.", rich_help_panel=MODEL_PANEL)
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="CPU threads.", show_default="PyTorch's choice", rich_help_panel=MODEL_PANEL
    ),
]
MaxContextOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of prompt and answer together.",
        show_default="the model's, at most 8192",
        rich_help_panel=MODEL_PANEL,
    ),
]
NumDraftTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest block to draft.",
        show_default="the drafter's own",
        rich_help_panel=MODEL_PANEL,
    ),
]
VerifyOption = Annotated[
    str,
    typer.Option(
        "--verify",
        metavar="MODE",
        help="How much of each draft to check: all, static:K, threshold:P, causal, lagged or auto. "
        "The last three weigh costs, measured once unless DSPARK_NO_PROFILE=1.",
        rich_help_panel=MODEL_PANEL,
    ),
]
PipelineOption = Annotated[
    str,
    typer.Option(
        "--pipeline",
        metavar="MODE",
        help="Draft in a second process while the target verifies: off, on, or auto, which "
        "does so from a later text on if the first ones have shown that it pays.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DraftDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--draft-device",
        metavar="DEVICE",
        help="Where the drafter drafts, in a thread of this process: cpu or cuda[:N].",
        show_default="the target's device",
        rich_help_panel=MODEL_PANEL,
    ),
]
EmulateOption = Annotated[
    str | None,
    typer.Option(
        "--emulate-device",
        metavar="TIMES",
        help="Another device's times around the same computations, as in verify=20ms,draft=5ms.",
        show_default=False,
        rich_help_panel=MODEL_PANEL,
    ),
]


def load_llm(
    model: str,
    *,
    drafter: str,
    num_draft_tokens: int | None,
    dtype: str,
    device: str,
    threads: int | None,
    max_context: int | None,
    verify: str = "auto",
    max_users: int | None = None,
    prefix_reuse: bool = True,
    pipeline: str = "off",
    draft_device: str | None = None,
    emulate: str | None = None,
) -> LLM:
    # Here, not on top: importing torch takes seconds, and `--help` must not wait for it.
    from dspark.llm import LLM

    rest: dict[str, Any] = {} if max_users is None else {"max_users": max_users}
    return LLM(
        model,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        verify=verify,
        dtype=dtype,
        device=device,
        threads=threads,
        max_context=max_context,
        prefix_reuse=prefix_reuse,
        pipeline=pipeline,
        draft_device=draft_device,
        emulate=emulate,
        **rest,
    )
