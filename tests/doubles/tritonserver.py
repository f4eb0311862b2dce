"""Double of `tritonserver` with the backend tensorrtllm: one rank of a launch.

Order of the real one: command line, models, signal handlers, ports. So SIGTERM while it loads kills it (and leaves its
region in /dev/shm), SIGTERM of a ready server ends it with 0. Ranks other than 0 never leave the loading; they end with
0 when rank 0 ended in order. Settings: die_rank …, hang_rank, load_seconds, gpus, sm, container.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from tests.doubles.containers import Versions, versions
from tests.doubles.llmapi_model import is_llmapi, load_llmapi
from tests.doubles.model_configs import LoadError, Model, check_ensembles, read_repository
from tests.doubles.ranks import Meeting, Region, RegionError
from tests.doubles.settings import Settings, read_settings, record_call
from tests.doubles.triton_options import Options, UsageError, parse
from tests.doubles.trtllm_backend import Devices, World, load_core, world

_PAUSE = 0.02
_DEFAULT_PREFIX = "triton_python_backend_shm_region_"


def _log(text: str, level: str = "I", place: str = "server.cc:1") -> None:
    stamp = time.strftime("%m%d %H:%M:%S")
    sys.stderr.write(f'{level}{stamp}.{time.time_ns() // 1000 % 1_000_000:06d} {os.getpid()} {place}] "{text}"\n')
    sys.stderr.flush()


def _die(settings: Settings) -> None:
    sys.stderr.write("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMalloc: out of memory\n")
    sys.stderr.flush()
    if settings.die_signal:
        os.kill(os.getpid(), settings.die_signal)
        time.sleep(60)
    os._exit(settings.die_code)


def _arm(settings: Settings, mpi: World, meeting: Meeting, folder: Path) -> None:
    """Start the thread that ends this rank, if the test configured that."""
    if settings.die_rank != mpi.rank:
        return

    def wait() -> None:
        while settings.die_when == "ready" and not meeting.told(0, "ready"):
            time.sleep(_PAUSE)
        while settings.die_when == "asked" and not (folder / "die").exists():
            time.sleep(_PAUSE)
        time.sleep(settings.die_after)
        _die(settings)

    threading.Thread(target=wait, daemon=True).start()


class _Server:
    """One rank's life."""

    def __init__(self, options: Options, folder: Path, settings: Settings, found: Versions) -> None:
        self.options = options
        self.folder = folder
        self.settings = settings
        self.found = found
        self.mpi = world()
        self.meeting = Meeting(folder, self.mpi.size)
        self.models: dict[str, Model] = {}
        self.workers: list[subprocess.Popen[bytes]] = []
        self.closing = False
        self.region: Region | None = None

    def run(self) -> int:
        """Load, serve, end; the exit code."""
        _arm(self.settings, self.mpi, self.meeting, self.folder)
        try:
            self._load()
        except (LoadError, RegionError) as error:
            _log(f"ERROR: Failed to create instance: {error}", "E", "backend_model.cc:692")
            sys.stderr.write("error: creating server: Internal - failed to load all models\n")
            self._close()
            return 1
        if self.mpi.rank == self.settings.hang_rank:
            while True:
                time.sleep(60)
        self.meeting.tell(self.mpi.rank, "loaded")
        if self.mpi.rank != 0:
            return self._wait_as_worker()
        while not self.meeting.all_told("loaded"):
            time.sleep(_PAUSE)
        return self._serve()

    def _chosen(self, models: dict[str, Model], wrong: dict[str, str]) -> dict[str, Model]:
        names = self.options.repeated.get("load-model", []) if self.options.explicit else []
        if not self.options.explicit or names == ["*"]:
            for name, text in wrong.items():
                _log(f"Poll failed for model directory '{name}': {text}", "E", "model_repository_manager.cc:1460")
            if wrong:
                raise LoadError("; ".join(f"{name}: {text}" for name, text in wrong.items()))
            return models
        for name in names:
            if name not in models:
                raise LoadError(wrong.get(name, f"failed to load '{name}', failed to poll from model repository"))
        return {name: models[name] for name in names}

    def _load(self) -> None:
        prefix = self.options.backend_setting("python", "shm-region-prefix-name")
        self.region = Region(self.folder, prefix or _DEFAULT_PREFIX)
        models, wrong = read_repository(self.options.repositories)
        chosen = self._chosen(models, wrong)
        if not chosen:
            raise LoadError("(strict double) no model to load")
        if (unsound := check_ensembles(chosen)) and not self.options.explicit:
            raise LoadError("; ".join(unsound.values()))
        time.sleep(self.settings.load_seconds)
        devices = Devices()
        cores = [model for model in chosen.values() if model.is_core]
        apis = [model for model in chosen.values() if is_llmapi(model)]
        if self.mpi.size > 1 and not cores + apis:
            raise LoadError("(strict double) several ranks, but no model with an engine among those to load")
        completed = "disable-auto-complete-config" not in self.options.values
        for model in apis:
            load_llmapi(model, self.mpi.size, completed, self.found, self.settings)
        for model in cores:
            load_core(model, self.mpi, self.found, self.settings, devices)
            _log(f"successfully loaded '{model.name}'", place="model_lifecycle.cc:849")
        if self.mpi.orchestrator and self.mpi.spawn:
            self._spawn(cores)
        self.models = chosen

    def _spawn(self, cores: list[Model]) -> None:
        """Start the worker processes that MPI_Comm_spawn would start, one per device of each model."""
        for model in cores:
            path = (
                model.parameter("executor_worker_path") or "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
            )
            groups = (model.parameter("gpu_device_ids") or "0").replace(";", ",").split(",")
            for device in groups:
                name = f"{Path(path).name} {model.name} {device}"
                parent = os.getpid()
                program = f"import os,time\nwhile os.getppid() == {parent}: time.sleep(0.1)  # {name}"
                self.workers.append(subprocess.Popen([sys.executable, "-SE", "-c", program]))
        threading.Thread(target=self._watch_workers, daemon=True).start()

    def _watch_workers(self) -> None:
        """End by the signal that ended a worker: mpirun aborts every job that is connected to a killed process."""
        while not self.closing:
            for worker in self.workers:
                if (code := worker.poll()) is not None and not self.closing:
                    _log(f"(double) worker {worker.pid} has ended: {code}", "E")
                    os.kill(os.getpid(), -code if code < 0 else signal.SIGABRT)
            time.sleep(_PAUSE)

    def _wait_as_worker(self) -> int:
        """Stay in initialisation until rank 0 ended in order."""
        while not self.meeting.told(0, "ended"):
            time.sleep(_PAUSE)
        sys.stderr.write(
            "[TensorRT-LLM][INFO] Terminating worker process since shutdown signal was received from leader or "
            "orchestrator\n"
        )
        self._close()
        return 0

    def _serve(self) -> int:
        # No Event: its lock may be held by the very code that a signal interrupts.
        ending: list[int] = []

        def stop(number: int, _frame: FrameType | None) -> None:
            ending.append(number)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        if not self._open_ports():
            self._close()
            return 1
        self.meeting.tell(0, "ready")
        while not ending:
            time.sleep(_PAUSE)
        _log("Waiting for in-flight requests to complete.", place="server.cc:305")
        _log("Timeout 30: Found 0 live models and 0 in-flight non-inference requests", place="server.cc:345")
        self.meeting.tell(0, "ended")
        self._close()
        return 0

    def _open_ports(self) -> bool:
        from tests.doubles.triton_http import State, listen, serve

        state = State(self.models, self.found.triton)
        for name, title, port in (
            ("grpc", "GRPCInferenceService", 8001),
            ("http", "HTTPService", 8000),
            ("metrics", "Metrics Service", 8002),
        ):
            if not self.options.boolean(f"allow-{name}", True):
                continue
            # Metrics use the address of HTTP unless they have their own.
            default = self.options.values.get("http-address", "0.0.0.0") if name == "metrics" else "0.0.0.0"
            address = self.options.values.get(f"{name}-address", default)
            number = self.options.integer(f"{name}-port", port)
            try:
                if name == "grpc":
                    self.listening = listen(address, number)
                else:
                    serve(address, number, state, metrics=name == "metrics")
            except OSError:
                what = "GRPC" if name == "grpc" else "HTTP" if name == "http" else "Metrics"
                sys.stderr.write(
                    f"failed to start {what} service: Unavailable - Socket '{address}:{number}' already in use \n"
                )
                return False
            _log(f"Started {title} at {address}:{number}", place=f"{name}_server.cc:2466")
        return True

    def _close(self) -> None:
        self.closing = True
        for worker in self.workers:
            worker.terminate()
            worker.wait()
        if self.region is not None:
            self.region.close()


def main(arguments: list[str], folder: Path) -> int:
    """Run the double; returns the exit code."""
    record_call(folder, "tritonserver", arguments)
    settings = read_settings(folder)
    found = versions(settings)
    try:
        options = parse(arguments, found.container)
    except UsageError as error:
        sys.stderr.write(f"Usage: tritonserver [options]\n  --help\n\tPrint usage\n\n{error}\n")
        return 1
    if "log-file" in options.values:
        # The real one logs into this file instead of to the console.
        descriptor = os.open(options.values["log-file"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 2)
    return _Server(options, folder, settings, found).run()
