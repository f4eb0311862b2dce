"""Run the stages of a benchmark, print what they found, and judge it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.cli import output
from trtserve.cli.bench_results import MORE_CLIENT, print_report, print_stages, require_valid, say_notes
from trtserve.cli.endpoint import Connection, find_endpoint, find_openai_endpoint
from trtserve.cli.options import DRY_RUN_HELP, JSON_HELP, QUIET_HELP
from trtserve.errors import BenchmarkError, DoubtfulResultError, TrtserveError, UsageError
from trtserve.files import make_folder
from trtserve.specs import BenchRuns, BenchSpec
from trtserve.specs.options import Spec, given_flags, option

if TYPE_CHECKING:
    from trtserve.bench.report import BenchReport
    from trtserve.bench.targets import Found
    from trtserve.client.endpoint import Endpoint
    from trtserve.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Results(Spec):
    """Where the results of a benchmark go; every kind of traffic has these options."""

    out: Path | None = option(
        None, metavar="DIR", help="Write report.json, requests.jsonl and more to this folder.", common=True
    )
    json: bool = option(False, help=JSON_HELP, common=True)
    dry_run: bool = option(False, help=DRY_RUN_HELP, common=True)
    quiet: bool = option(False, "--quiet", "-q", help=QUIET_HELP, common=True)


def run_benchmarks(spec: BenchSpec, runs: BenchRuns, connection: Connection, results: Results) -> None:
    """Run all stages of a benchmark, and print and write what it found.

    Raises BenchmarkError for failed requests, and DoubtfulResultError if --strict was given.
    """
    _require_one_process()
    _check_combination(spec, runs, connection)
    progress = output.TerminalProgress(quiet=results.quiet)
    if runs.html is not None and not results.dry_run:
        from trtserve.bench.plots import check_plots

        check_plots(runs.html, out=results.out)
    served = spec.openai is None and spec.in_process is None
    endpoint = find_endpoint(connection, model=spec.model) if served else _other_endpoint(spec, connection)
    if results.dry_run:
        _describe(spec, endpoint, json=results.json)
        return
    if runs.diagnose:
        _require_repository(endpoint)
    metrics = runs.metrics_url or (metrics_url(connection) if served else None)
    stages = _Stages(endpoint, metrics=metrics, out=results.out, progress=progress)
    reports = stages.all(spec, runs)
    _print(spec, runs, reports, stages.found, json=results.json)
    say_notes(reports, progress.step)
    if stages.found is not None:
        _say_found(stages.found, progress)
    if stages.unwritten is not None:
        raise stages.unwritten
    interrupted = any(report.interrupted for report in reports)
    if runs.diagnose and not interrupted:
        _diagnose(spec, endpoint, reports[-1], metrics=metrics, progress=progress)
    if runs.html is not None:
        from trtserve.bench.plots import write_plots

        write_plots(reports, runs.html)
        progress.step(f"Written: {runs.html}")
    elif results.out is None and not results.json:
        from trtserve.bench.plots import can_plot

        page = "--html FILE writes a page with plots, " if can_plot() else ""
        progress.step(f"Next: {page}--out DIR keeps the result for `bench compare`.")
    if interrupted:
        raise KeyboardInterrupt
    _require_answers(reports, stages.found, runs)


def _require_one_process() -> None:
    """Raise UsageError under mpirun or srun: each rank would send all requests."""
    # Set by Open MPI, by MPICH, and by srun with any MPI.
    sizes = (os.environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    count = next((int(size) for size in sizes if size.isdigit() and int(size) > 1), None)
    if count is not None:
        raise UsageError(
            f"`bench` was started {count} times, by mpirun or srun; one process measures a server.",
            hint="Start it without mpirun or srun; --workers N sends from N processes of this machine.",
        )


def _print(spec: BenchSpec, runs: BenchRuns, reports: list[BenchReport], found: Found | None, *, json: bool) -> None:
    if json:
        whole = [report.to_json() for report in reports]
        several = {"stages": whole} | ({} if found is None else {"highest_rate": asdict(found)})
        output.print_json(f"bench {spec.traffic}", several if runs.several else whole[0])
    elif runs.several:
        print_stages(reports)
    else:
        print_report(reports[0], table=runs.table)


def _check_combination(spec: BenchSpec, runs: BenchRuns, connection: Connection) -> None:
    from trtserve.bench.statistics import read_goals
    from trtserve.client.tensors import CORE_MODEL

    read_goals(spec.slo)
    if spec.protocol == "http" and connection.url is not None:
        raise UsageError(
            "--url is the gRPC address, which also describes the model; --protocol http needs both ports.",
            hint="Give --host HOST --http-port 8000 --grpc-port 8001.",
        )
    if sum(map(bool, (runs.sweep_rate, runs.sweep_concurrency, runs.find_rate))) > 1:
        raise UsageError("Give one of --sweep-rate, --sweep-concurrency and --find-rate.")
    if runs.find_rate and not spec.slo:
        raise UsageError("--find-rate searches the rate at which --slo is met; give --slo, such as ttft=200ms.")
    scheduled = spec.open_loop or bool(runs.sweep_rate) or runs.find_rate
    for flag, alone, needed in (
        ("--ramp-to", spec.ramp_to is not None and not scheduled, "--request-rate"),
        ("--arrivals", spec.arrivals != "exponential" and not scheduled, "--request-rate"),
        ("--burstiness", spec.burstiness != 1.0 and spec.arrivals != "gamma", "--arrivals gamma"),
        ("--chat", spec.chat and spec.openai is None, "--openai"),
    ):
        if alone:
            raise UsageError(f"{flag} has no effect without {needed}; give both.")
    local, remote = spec.in_process is not None, spec.openai is not None
    address = given_flags(connection, ("server", "host", "http_port", "grpc_port", "url"))
    for flag, other, both in (
        *((flag, "--openai", remote) for flag in address),
        *((flag, "--in-process", local) for flag in address),
        ("--protocol", "--openai", remote and spec.protocol != "grpc"),
        ("--protocol", "--in-process", local and spec.protocol != "grpc"),
        ("--diagnose", "--in-process", local and runs.diagnose),
        ("--model", "--in-process", local and spec.model not in (None, CORE_MODEL)),
        ("--request-rate", "--sweep-rate", spec.request_rate is not None and bool(runs.sweep_rate)),
        ("--concurrency", "--sweep-concurrency", spec.concurrency is not None and bool(runs.sweep_concurrency)),
    ):
        if both:
            raise UsageError(f"{flag} has no effect with {other}; leave one of them out.")


def _other_endpoint(spec: BenchSpec, connection: Connection) -> Endpoint:
    """Return what is known of a server that is not asked as a Triton server: tokenizer and key of one started here."""
    from trtserve.client.endpoint import Endpoint

    own = None if spec.openai is None else find_openai_endpoint(spec.openai, spec.model)
    own = own or Endpoint()
    return replace(own, connect_timeout=connection.connect_timeout or own.connect_timeout)


def metrics_url(connection: Connection) -> str | None:
    """Return the metrics page of a server that was started here."""
    if connection.explicit:
        return None
    from trtserve.server.status import find_source
    from trtserve.server.triton.tritonserver import client_host

    address = find_source(connection.server).address
    return f"http://{client_host(address.host)}:{address.metrics_port}/metrics" if address.metrics_port else None


class _Stages:
    """Runs a benchmark, or every stage of a sweep or a search; an interrupt ends the stages."""

    def __init__(
        self, endpoint: Endpoint, *, metrics: str | None, out: Path | None, progress: output.TerminalProgress
    ) -> None:
        self._endpoint, self._metrics, self._out, self._progress = endpoint, metrics, out, progress
        self._reports: list[BenchReport] = []
        self.found: Found | None = None
        """What --find-rate found."""
        self.unwritten: TrtserveError | None = None
        """Why results are not in the folder: the figures are printed first."""

    def all(self, spec: BenchSpec, runs: BenchRuns) -> list[BenchReport]:
        if not runs.several:
            self._run(spec)
            return self._reports
        stages = [(replace(spec, request_rate=rate), f"rate-{rate:g}") for rate in runs.sweep_rate]
        stages += [(replace(spec, concurrency=number), f"concurrency-{number}") for number in runs.sweep_concurrency]
        for stage, name in stages:
            if self._run(stage, name).interrupted:
                return self._reports
        if runs.find_rate:
            self._search(spec)
        return self._reports

    def _run(self, stage: BenchSpec, name: str | None = None) -> BenchReport:
        # One calibration tells about all stages.
        stage = replace(stage, calibrate=stage.calibrate and not self._reports)
        with output.ChangingLine(quiet=self._progress.quiet) as progress:
            # What follows may take seconds: imports, the server's description, the tokenizer, the prompts.
            progress.step("Preparing the requests")
            from trtserve.bench.plan import plan_benchmark
            from trtserve.bench.run import run_benchmark

            plan = plan_benchmark(stage, self._endpoint)
            if self._out is not None:  # fail before the benchmark rather than after it
                make_folder(self._out)
            report = run_benchmark(plan, progress=progress, metrics=self._metrics)
        self._reports.append(report)
        if self._out is not None:
            folder = self._out if name is None else self._out / name
            from trtserve.bench.exports import write_result

            try:
                write_result(report, folder)
                self._progress.step(f"Written: {folder / 'report.json'}, {folder / 'requests.jsonl'} and more")
            except TrtserveError as error:
                self.unwritten = error
        return report

    def _search(self, spec: BenchSpec) -> None:
        from trtserve.bench.report import brief
        from trtserve.bench.targets import TRIES, Answer, highest_rate, rate_answer

        def answer(rate: float) -> Answer:
            found: Answer = "unclear"
            for number in range(TRIES):
                name = f"rate-{rate:g}" + (f"-again-{number}" if number else "")
                report = self._run(replace(spec, request_rate=rate), name)
                if report.interrupted:
                    raise KeyboardInterrupt
                found = rate_answer(report)
                counts = report.statistics.counts
                good = f"{report.statistics.good_answers} of {counts.sent} answers good"
                self._progress.step(f"{brief(rate)} requests/s {found}: {good}; {report.verdict}")
                if found != "unclear":
                    break
            return found

        # An interrupt ends the search; what was measured is printed.
        with suppress(KeyboardInterrupt):
            self.found = highest_rate(answer, first=spec.request_rate or 1.0)


def _say_found(found: Found, progress: Progress) -> None:
    from trtserve.bench.report import brief

    rate, beyond = ("" if each is None else brief(each) for each in (found.rate, found.beyond))
    if found.rate is None:
        told = f"No rate meets --slo; the lowest tried was {beyond} requests/s"
    elif found.beyond is None:
        told = f"Every rate tried meets --slo, up to {rate} requests/s"
    else:
        told = f"Highest rate that meets --slo: {rate} requests/s; {beyond} misses it"
    if found.limited_by == "client":
        told += ", and the client was the limit there, not the server"
    progress.step(f"{told}.")


def require_complete(report: BenchReport, *, strict: bool) -> None:
    """Raise BenchmarkError for failed requests, and with `strict` DoubtfulResultError for a verdict but `valid`."""
    failed = [record for record in report.records if record.status == "failed"]
    if report.timed_out:
        counts = report.statistics.counts
        ended = f"--timeout {report.spec['timeout_s']:g} was over before all {counts.planned} requests were answered"
        raise BenchmarkError(
            f"{ended}: {counts.completed} completed, {counts.failed} failed, {counts.unsent} never sent.",
            hint="Raise --timeout, or send fewer or shorter requests: --num-requests, --output-mean.",
        )
    if failed:
        reasons = {record.error: None for record in failed}
        raise BenchmarkError(
            f"{len(failed)} of {len(report.records)} requests failed: {'; '.join(map(str, list(reasons)[:3]))}",
            hint="The figures above include them as infinitely slow; `trtserve logs` shows the server's side.",
        )
    if strict:
        require_valid([report])


def _require_answers(reports: list[BenchReport], found: Found | None, runs: BenchRuns) -> None:
    for report in reports:
        require_complete(report, strict=False)
    if runs.strict and not runs.find_rate:
        require_valid(reports)
    if runs.strict and found is not None and found.limited_by == "client":
        raise DoubtfulResultError("The search ended at the client's limit, not the server's.", hint=MORE_CLIENT)


def _require_repository(endpoint: Endpoint) -> None:
    if endpoint.repository is None:
        raise UsageError(
            "--diagnose needs the server's repository on this machine, whose engine it runs.",
            hint="Run it where the server was started by trtserve.",
        )
    if not endpoint.grpc_port:
        raise UsageError(
            "--diagnose asks the core model itself, which a port for many models does not pass on.",
            hint="Start the model as a server of its own: trtserve start NAME --name OTHER.",
        )


def _diagnose(
    spec: BenchSpec, endpoint: Endpoint, measured: BenchReport, *, metrics: str | None, progress: Progress
) -> None:
    """Measure the engine in this process and the core model with the same spec, and print the gaps."""
    from trtserve.bench.compare import diagnose
    from trtserve.bench.plan import plan_benchmark
    from trtserve.bench.run import run_benchmark
    from trtserve.client.tensors import CORE_MODEL

    quiet = replace(spec, calibrate=False, openai=None, chat=False)
    own = replace(quiet, in_process=str(endpoint.repository), model=None)
    asked = (own, replace(quiet, model=CORE_MODEL))
    found = []
    for each in asked:
        found.append(run_benchmark(plan_benchmark(each, endpoint), progress=progress, metrics=metrics))
        if found[-1].interrupted:
            raise KeyboardInterrupt
    alone, core = found
    gaps = diagnose(alone, core, measured, endpoint.repository)
    for gap in gaps:
        first = "" if gap.first_token_ms is None else f" {gap.first_token_ms:+.2f} ms to the first token,"
        rate = "" if gap.throughput is None else f" tokens/s × {gap.throughput:.2f},"
        progress.step(f"gap: {gap.name}:{first}{rate} {gap.reason}")


def _describe(spec: BenchSpec, endpoint: Endpoint, *, json: bool) -> None:
    """Print what would be sent, without sending it."""
    from trtserve.bench.plan import plan_benchmark

    plan = plan_benchmark(spec, endpoint, offline=True)
    requests = plan.traffic.requests
    tokens = sum(len(request.token_ids) for request in requests), sum(request.output_len for request in requests)
    target = plan.measured.target
    where = endpoint.grpc if target is None else target.address
    if json:
        described = {"model": plan.measured.name, "endpoint": where, "requests": len(requests)}
        described |= {"input_tokens": tokens[0], "output_tokens": tokens[1], "concurrency": plan.concurrency}
        described |= {"request_rate": spec.request_rate, "notes": plan.notes, "dry_run": True}
        output.print_json(f"bench {spec.traffic}", described)
        return
    output.print_data(
        f"Would send {len(requests)} requests to {plan.measured.name!r} at {where} ({plan.pace}): "
        f"{tokens[0]} prompt tokens, {tokens[1]} tokens to generate."
    )
    for note in plan.notes:
        output.say(f"note: {note}")
