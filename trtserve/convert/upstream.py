"""Conversions that NVIDIA's tools carry out, published as our own ones are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Checkpoint, Manifest, Model
from trtserve.capacity.room import require_disk
from trtserve.check import plan_check
from trtserve.convert.plan import Destination, Plan, all_wishes
from trtserve.convert.proof import Proof
from trtserve.errors import ConversionError, UsageError
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import CheckSpec
from trtserve.store import Store, publish
from trtserve.upstream import Toolkit, run_tool, tool_command


def upstream_command(model: Model, plan: Plan, folder: Path) -> Command:
    """The command that makes the checkpoint in `folder`; UsageError when our own converter does."""
    if plan.toolkit is None:
        raise UsageError("Our own converter runs no command.")
    return tool_command(plan.toolkit, plan.spec, plan.config["architecture"], model.path.absolute(), folder)


def convert_upstream(
    model: Model,
    plan: Plan,
    toolkit: Toolkit,
    name: str,
    place: Destination,
    store: Store,
    verify: CheckSpec | None,
    progress: Progress,
) -> Checkpoint:
    """Let NVIDIA's tool fill the artefact; it is published only when it is a whole checkpoint of the kind wanted."""
    manifest = Manifest(
        kind="checkpoint",
        name=name,
        fingerprint=plan.fingerprint,
        inputs={model.name: model.fingerprint},
        spec=all_wishes(plan.spec),
        tools={"tensorrt_llm": toolkit.version},
        facts={"model": str(model.path.absolute())},
    )
    if place.reused:
        progress.step(f"Checkpoint {place.path} is reused")

    def produce(folder: Path) -> Manifest:
        require_disk(folder.parent, plan.total_bytes, "The checkpoint")
        command, log = upstream_command(model, plan, folder), store.root / "logs" / f"convert-{place.path.name}.log"
        progress.step(str(command))
        config = run_tool(command, folder, world_size=len(plan.sizes), log=log, progress=progress)
        _require_quantised(plan, config, log)
        facts = {**manifest.facts, "command": str(command), "log": str(log), "bytes": _bytes_of(folder)}
        if verify is not None:
            proof = Proof(plan_check(config, model.path, verify, progress=progress), place, progress)
            facts["check"] = proof.require(folder)
        return replace(manifest, facts=facts)

    return publish(Checkpoint, place.path, manifest, produce)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rank*.safetensors"))


def _require_quantised(plan: Plan, config: Mapping[str, Any], log: Path) -> None:
    found = (config.get("quantization") or {}).get("quant_algo")
    if plan.spec.quantize != "none" and found in (None, "NO_QUANT"):
        raise ConversionError(
            f"--quantize {plan.spec.quantize} was asked for, and the checkpoint is not quantised.",
            hint="Read the log for the reason.",
            log=log,
        )
