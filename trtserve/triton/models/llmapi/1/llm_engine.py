"""TensorRT-LLM's LLM API in this process: its settings, its event loop, and what other ranks do meanwhile."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_requests import LlmRequest

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
    """Remove the variables of the MPI job that Triton was started in: the LLM starts workers of its own."""
    for name in list(os.environ):
        if name.startswith(_JOB_VARIABLES) and not name.startswith(_CONFIGURATION):
            del os.environ[name]


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of model.yaml, or of the file that LLM_CONFIG_PATH names; ValueError when it is no table."""
    import yaml

    path = folder / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{path} names no model.")
    return content


def choose_gpus(groups: str, instances: int, instance: str) -> int | None:
    """Leave this process the GPUs of its instance and return their number; None when all are its own.

    `groups` is the parameter gpu_device_ids, `instance` the name that Triton gave the instance, such as `llm_0_1`.
    TensorRT-LLM must not have been imported: CUDA opens the GPUs that it sees then. ValueError for a wrong list.
    """
    if instances <= 1 and not groups:
        return None
    lists = groups.split(";") if groups else []
    if len(lists) != instances:
        raise ValueError(f"Parameter gpu_device_ids is {groups!r}; {instances} instances need as many groups of GPUs.")
    chosen = lists[int(instance.rpartition("_")[2])] if instances > 1 else lists[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = chosen
    return len(chosen.split(","))


class LlmEngine:
    """One `LLM`, whose requests run in an event loop of its own; only rank 0 has one."""

    def __init__(self, settings: Mapping[str, Any], repository: Path, *, gpus: int | None) -> None:
        """Load the model; on ranks other than 0, work for rank 0 until it ends."""
        forget_mpi_job()
        self._api = importlib.import_module("tensorrt_llm")
        utilities = importlib.import_module("tensorrt_llm._utils")
        self.leads = utilities.global_mpi_rank() == 0
        if not self.leads:
            _work_for_the_leader()
            return
        keywords = {name: value for name, value in settings.items() if name != "triton_config"}
        keywords["model"] = _model(str(keywords["model"]), repository)
        if gpus is not None:
            keywords["gpus_per_node"] = gpus
        if utilities.global_mpi_size() > 1:
            keywords["_mpi_session"] = _mpi_session()
        self._llm = self._api.LLM(**keywords)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def start(self, request: LlmRequest) -> Any:
        """Begin a request, in the event loop; the result is iterated there, and has `abort`."""
        parameters = self._api.SamplingParams(**request.sampling)
        keywords: dict[str, Any] = {}
        if request.lora:
            requests = importlib.import_module("tensorrt_llm.executor.request")
            keywords["lora_request"] = requests.LoRARequest(**request.lora)
        return self._llm.generate_async(request.prompt, parameters, streaming=request.streaming, **keywords)

    def close(self) -> None:
        """End the event loop and the model."""
        if not self.leads:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        self._llm.shutdown()


def _model(text: str, repository: Path) -> str:
    """A folder of the repository as an absolute path; another folder, or a name of the hub, as it is."""
    folder = repository / text
    return str(folder) if folder.is_dir() else text


def _mpi_session() -> Any:
    communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
    session = importlib.import_module("tensorrt_llm.llmapi").MpiCommSession
    return session(comm=communicator, n_workers=communicator.Get_size())


def _work_for_the_leader() -> None:
    communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
    with importlib.import_module("mpi4py.futures").MPICommExecutor(communicator):
        pass
