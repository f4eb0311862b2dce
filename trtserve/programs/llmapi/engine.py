"""TensorRT-LLM's LLM API in this process: settings, event loop, and the work of other ranks."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..shared.files import read_text
from .requests import LlmRequest

_JOB_VARIABLES = (
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_FIRST_RANKS",
    "OMPI_APP_CTX_NUM_PROCS",
    "OMPI_MCA_orte_",
    "ORTE_",
    "PMI_",
    "PMIX_",
)
_CONFIGURATION = "PMIX_MCA_"


def forget_mpi_job() -> None:
    """Remove the environment variables of Triton's MPI job, because the LLM starts its own workers."""
    for name in list(os.environ):
        if name.startswith(_JOB_VARIABLES) and not name.startswith(_CONFIGURATION):
            del os.environ[name]


def read_settings(folder: Path) -> dict[str, Any]:
    """Read model.yaml, or the file that LLM_CONFIG_PATH names. Raises ValueError when it names no model."""
    import yaml

    path = folder / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    content = yaml.safe_load(read_text(path))
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{path} names no model.")
    return content


def choose_gpus(groups: str, instances: int, instance: str) -> int | None:
    """Make only the GPUs of this instance visible and return their number, or None when it has all GPUs.

    `groups` is the parameter gpu_device_ids, `instance` the name that Triton gave the instance, such as `llm_0_1`. Call
    this before TensorRT-LLM is imported, because CUDA opens all visible GPUs then. Raises ValueError for a wrong list.
    """
    if instances <= 1 and not groups:
        return None
    lists = groups.split(";") if groups else []
    if len(lists) != instances:
        raise ValueError(
            f"Parameter gpu_device_ids is {groups!r}; expected one group of GPUs for each of {instances} instances."
        )
    chosen = lists[int(instance.rpartition("_")[2])] if instances > 1 else lists[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = chosen
    return len(chosen.split(","))


class LlmEngine:
    """One `LLM` with its own event loop; only rank 0 has one."""

    def __init__(self, settings: Mapping[str, Any], repository: Path, *, gpus: int | None) -> None:
        """Load the model; other ranks work for rank 0 until it ends."""
        forget_mpi_job()
        self._api = importlib.import_module("tensorrt_llm")
        utilities = importlib.import_module("tensorrt_llm._utils")
        self.leads = utilities.global_mpi_rank() == 0
        if not self.leads:
            communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
            with importlib.import_module("mpi4py.futures").MPICommExecutor(communicator):
                pass
            return
        keywords = {name: value for name, value in settings.items() if name != "triton_config"}
        # A folder of the repository becomes an absolute path; other folders and names of the hub stay as they are.
        folder = repository / str(keywords["model"])
        keywords["model"] = str(folder) if folder.is_dir() else str(keywords["model"])
        if gpus is not None:
            keywords["gpus_per_node"] = gpus
        if utilities.global_mpi_size() > 1:
            keywords["_mpi_session"] = _mpi_session()
        self._llm, self._turns = self._api.LLM(**keywords), 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def start(self, request: LlmRequest) -> Any:
        """Start a request, in the event loop; the result can be iterated there, and has `abort`."""
        parameters = self._api.SamplingParams(**request.sampling)
        keywords: dict[str, Any] = {}
        if request.lora:
            requests = importlib.import_module("tensorrt_llm.executor.request")
            keywords["lora_request"] = requests.LoRARequest(**request.lora)
        return self._llm.generate_async(request.prompt, parameters, streaming=request.streaming, **keywords)

    def turn(self) -> int:
        """Ask the event loop for a turn, and return how many of them it has made."""
        self.loop.call_soon_threadsafe(lambda: setattr(self, "_turns", self._turns + 1))
        return self._turns

    def healthy(self) -> bool:
        """Return whether the LLM still works; True in older releases, which cannot tell."""
        check = getattr(self._llm, "_check_health", None)
        return check is None or bool(check())

    def close(self) -> None:
        """Stop the event loop and the model."""
        if not self.leads:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()
        self._llm.shutdown()


def _mpi_session() -> Any:
    communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
    session = importlib.import_module("tensorrt_llm.llmapi").MpiCommSession
    return session(comm=communicator, n_workers=communicator.Get_size())
