"""`trtserve lora`: convert a PEFT adapter to the LoRA tensors of TensorRT-LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.cli.options import DryRunOption, JsonOption, OutOption, QuietOption, paths
from trtserve.cli.output import TerminalProgress, print_data, print_json

if TYPE_CHECKING:
    from trtserve.pipeline.lora import AdapterPlan


def lora(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER", help="Folder of a PEFT adapter, or org/name[@revision] of the hub.", autocompletion=paths
        ),
    ],
    storage_type: Annotated[
        Literal["float16", "float32", "bfloat16"], typer.Option("--storage-type", help="Type of the weights.")
    ] = "float16",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the result.", show_default="the adapter's")
    ] = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a LoRA adapter, as NVIDIA's hf_lora_convert does, and print the folder of its two .npy files.

    Examples:
        trtserve lora ./poet-lora
        trtserve lora org/poet-lora --storage-type bfloat16 --name poet
    """
    from trtserve.pipeline.lora import build_options, plan_adapter, run_adapter_conversion

    progress = TerminalProgress(quiet=quiet)
    plan = plan_adapter(adapter, name=name, out=out, storage_type=storage_type)
    facts: dict[str, object] = {}
    if not dry_run:
        made = run_adapter_conversion(plan, progress=progress)
        facts = dict(made.manifest.facts) if made.manifest else {}
        progress.step(f"Engines for it are built with: {build_options(made)}")
    if json:
        print_json("lora", {**_described(plan), **facts})
    elif dry_run:
        print_data("\n".join(_lines(plan)))
    else:
        print_data(str(plan.path))


def _described(plan: AdapterPlan) -> dict[str, object]:
    return {
        "path": str(plan.path),
        "reused": plan.reused,
        "source": plan.source.text,
        "storage_type": plan.storage_type,
        "base_model": plan.config.base_model,
        "targets": plan.targets,
        "rows": len(plan.pairs),
        "fingerprint": plan.fingerprint,
    }


def _lines(plan: AdapterPlan) -> list[str]:
    pull = plan.revision is not None and not plan.reused
    return [
        f"adapter   {plan.source.text}, made for {plan.config.base_model or 'a model that it does not name'}",
        f"modules   {', '.join(plan.targets)} ({len(plan.pairs)})"
        if plan.pairs
        else "modules   known after the download",
        f"type      {plan.storage_type}",
        "state     reused: it exists already" if plan.reused else f"state     to be {'downloaded and ' * pull}made",
        f"to        {plan.path}",
    ]
