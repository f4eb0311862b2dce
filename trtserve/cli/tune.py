"""`trtserve tune`: find the settings of a setup file's server that meet a goal best on this machine."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtserve.cli.options import DryRunOption, JsonOption, QuietOption
from trtserve.cli.output import ChangingLine, TerminalProgress, print_data, print_json, print_table, say
from trtserve.cli.setup_file import FileArgument
from trtserve.errors import MissedLimitError, MissingDependencyError, UsageError
from trtserve.specs.options import Spec, option

if TYPE_CHECKING:
    from trtserve.pipeline.setup_file import SearchSetup, Setup
    from trtserve.pipeline.tuning.answer import TuneAnswer
    from trtserve.pipeline.tuning.search import Search
    from trtserve.pipeline.tuning.space import Space

_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Spec):
    """What is searched; None leaves it to the file."""

    goal: str | None = option(
        None,
        metavar="GOAL",
        help='What must hold: "ttft p99 < 500 ms, itl p99 < 40 ms".',
        unset="that of the file",
    )
    aim: Literal["throughput", "requests"] | None = option(
        None, "--max", help="What to maximise.", unset="that of the file, throughput"
    )
    search: str | None = option(None, metavar="NAME", help="Search of the file.", unset="the only one")
    budget: float = option(30, metavar="MINUTES", help="Stop the trials after MINUTES.", minimum=0.1)
    trace: Path | None = option(
        None,
        metavar="FILE",
        help="Send the requests of this trace, as `bench replay` does.",
        unset="the load of the file",
    )
    out: Path | None = option(
        None,
        metavar="DIR",
        help="Folder of the trials; the same folder continues a search.",
        unset="SEARCH.tune beside the file",
    )


def tune(
    file: FileArgument = Path("trtserve.yaml"),
    *,
    wanted: TuneOptions,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the settings of a server that meet a goal best on this machine, and write them as a setup file.

    Builds, starts and measures what may be best, one configuration after another, and stops when no other can be
    better or the budget is used. An interrupted search continues where it was. Ends with code 53 if nothing meets the
    goal.

    Examples:
        trtserve tune llama.yaml --goal "ttft p99 < 500 ms, itl p99 < 40 ms"
        trtserve tune llama.yaml --budget 10 --dry-run
    """
    from trtserve.files import locked, make_folder
    from trtserve.pipeline.setup_file.reading import read_setup
    from trtserve.pipeline.tuning.answer import error_lines, headline, make_answer, write_answer
    from trtserve.pipeline.tuning.search import Goal, prepare
    from trtserve.pipeline.tuning.space import find_space
    from trtserve.specs.command_line import spec_arguments
    from trtserve.store import Store

    progress, store, setup = TerminalProgress(quiet=quiet), Store(), read_setup(file)
    asked = _asked(setup, wanted)
    folder = wanted.out or file.with_name(f"{asked.benchmark.name}.tune")
    space = find_space(setup, asked, store=store, progress=progress)
    goal = Goal(limits=asked.goal, aim=asked.aim)
    if dry_run:
        _print_space(space, prepare(space, goal, asked, folder, store, progress=progress), json=json)
        if not quiet and not json:
            say("Nothing was built or measured: the figures are guesses until `tune` has tried the best.")
            say(f"Next: {shlex.join(['trtserve', 'tune', str(file), *spec_arguments(wanted)])}")
        return
    page = _can_draw(progress)
    make_folder(folder)
    with locked(folder / ".lock", wait=False):
        with ChangingLine(quiet=quiet) as shown:
            budget = 60 * wanted.budget
            found = prepare(space, goal, asked, folder, store, budget=budget, progress=shown, tell=shown.keep)
            with found.trials.bench:
                found.run()
        answer = make_answer(found)
        target = write_answer(found, answer, file, folder, page=page)
    if json:
        print_json("tune", {"file": None if target is None else str(target), "folder": str(folder), **asdict(answer)})
    else:
        _print(answer, target)
    for line in (headline(answer), *answer.reasons, *error_lines(answer)):
        progress.step(line)
    if page:
        progress.step(f"Written: {folder / 'front.html'}")
    if target is None:
        nearest = found.outcome.nearest
        close = "" if nearest is None else f" The nearest was {nearest.name}."
        raise MissedLimitError(
            f"No configuration tried meets {answer.goal}.{close}", hint="Relax the goal or the load."
        )
    if not quiet and not json:
        say(f"Next: trtserve up {shlex.quote(str(target))}")


def _asked(setup: Setup, wanted: TuneOptions) -> SearchSetup:
    """Return the search that was named, or the only one, with what the command line says."""
    from trtserve.bench.targets import read_goal
    from trtserve.pipeline.setup_file import BenchmarkSetup, SearchSetup
    from trtserve.specs import BenchSpec
    from trtserve.specs.bench import FILE_DEFAULTS

    name, trace = wanted.search, wanted.trace
    searches = {each.benchmark.name: each for each in setup.searches}
    if not searches and name is None and len(setup.servers) == 1:
        server = setup.servers[0].name
        benchmark = BenchmarkSetup(
            name=server, server=server, spec=BenchSpec(), strict=False, requirements={}, out=None
        )
        searches = {server: SearchSetup(benchmark=benchmark, goal={}, aim="throughput", ranges={})}
    if name is None and len(searches) == 1:
        (found,) = searches.values()
    elif name in searches:
        found = searches[name]
    else:
        known = ", ".join(searches) or "none under `tune:`"
        raise UsageError(
            f"{setup.path} has the searches {known}.",
            hint="Name one: --search NAME. `trtserve help how-to/tune` shows them.",
        )
    if trace is not None:
        spec = replace(found.benchmark.spec, traffic="replay", trace=trace.absolute(), **FILE_DEFAULTS["replay"])
        found = replace(found, benchmark=replace(found.benchmark, spec=spec))
    limits = found.goal if wanted.goal is None else read_goal(wanted.goal)
    return replace(found, goal=limits, aim=wanted.aim or found.aim)


def _can_draw(progress: TerminalProgress) -> bool:
    from trtserve.bench.plots import check_plots

    try:
        check_plots(Path("front.html"))
    except MissingDependencyError as error:
        progress.warn(f"There will be no page. {error.message} {error.hint or ''}".rstrip())
        return False
    return True


def _print_space(space: Space, search: Search, *, json: bool) -> None:
    from trtserve.pipeline.tuning.search import UNITS

    rows = search.forecast()
    if json:
        print_json("tune", {"lanes": rows, "refused": space.refused})
        return
    columns = ["configuration", "load", f"expected {UNITS[search.goal.aim]}"]
    lines = [[row["configuration"], row["load"], f"{row['rate']:.4g}"] for row in rows[:_LISTED]]
    if search.goal.limits:
        columns.append("meets the goal")
        for line, row in zip(lines, rows, strict=False):
            line.append(f"no, by {row['missed']:.0%}" if row["missed"] else "yes")
    print_table(columns, lines)
    if len(rows) > _LISTED:
        say(f"… and {len(rows) - _LISTED} more; --json has all.")
    for name, why in space.refused.items():
        say(f"left out: {name}: {why}")


def _print(answer: TuneAnswer, target: Path | None) -> None:
    if target is not None:
        print_data(str(target))
    if answer.under:
        print_table(("goal alone", "fastest single trial, which may be luck"), list(answer.under.items()))
    if answer.more:
        print_table(("with more, as the model expects", "figures"), list(answer.more.items()))
