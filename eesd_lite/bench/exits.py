"""`--exit-layer auto`: tau, draft step and speed of every exit, measured under the plan's memory before the benchmark.

One engine at a time, so that no measurement takes more memory than its plan. Candidates are opened in order and then
in reverse, and a candidate's figures are of both visits: what the machine drifts by in between cancels. On a visit the
controllers take turns on the first prompts, as in the benchmark itself. Called by `bench.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eesd_lite.bench import internals
from eesd_lite.bench.contenders import BenchEngine, EngineContender, Run
from eesd_lite.bench.report import DIGITS, rate, total_stats
from eesd_lite.bench.settings import PLAIN, BenchSettings
from eesd_lite.bench.turns import Course, take_turns
from eesd_lite.errors import BudgetError, EesdError
from eesd_lite.progress import Progress, no_progress

PROMPTS, TOKENS = 3, 32  # of a visit: some seconds each

Open = Callable[[int | None], BenchEngine]  # None: without a head


@dataclass
class _Candidate:
    exit_layer: int | None
    note: str = ""
    resident_layers: int = 0
    sweep_bytes: int = 0
    draft_step_seconds: float | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by controller, of both visits


def measure_exits(
    settings: BenchSettings, course: Course, exit_layers: Sequence[int], open_engine: Open,
    progress: Progress = no_progress,
) -> dict[str, Any]:  # fmt: skip
    """The table, and the exit whose best controller was fastest. EesdError where no exit can draft."""
    params = replace(course.params, max_new_tokens=min(course.params.max_new_tokens, TOKENS))
    short = Course(course.prompt_ids[:PROMPTS], params, 1, min(course.warmup_tokens, TOKENS))
    candidates = [_Candidate(exit_layer) for exit_layer in (None, *sorted(exit_layers))]
    visits = [*candidates, *reversed(candidates)]
    for number, candidate in enumerate(visits):
        name = "plain decoding" if candidate.exit_layer is None else f"exit {candidate.exit_layer}"
        progress(f"measuring {name}", number, len(visits))
        if not candidate.note:
            _visit(candidate, settings, short, open_engine)
    rows = [_row(candidate, candidates[0]) for candidate in candidates]
    drafting = [row for row in rows[1:] if row["tokens_per_second"]]
    if not drafting:
        notes = "; ".join(f"exit {row['exit_layer']}: {row['note']}" for row in rows[1:])
        raise EesdError(f"--exit-layer auto: no exit can draft with these options ({notes or 'there are no heads'})")
    best = max(drafting, key=lambda row: row["tokens_per_second"])
    return {
        "chosen": best["exit_layer"],
        "plain_is_faster": rows[0]["tokens_per_second"] > best["tokens_per_second"],
        "prompts": len(short.prompt_ids),
        "max_new_tokens": params.max_new_tokens,
        "visits": 2,
        "rows": rows,
    }


def _visit(candidate: _Candidate, settings: BenchSettings, course: Course, open_engine: Open) -> None:
    try:
        engine = open_engine(candidate.exit_layer)
    except BudgetError as error:  # more layers below the exit than are resident
        candidate.note = str(error)
        return
    try:
        if engine.plan.exit_layer != candidate.exit_layer:
            candidate.note = "; ".join(engine.plan.notes) or "does not fit"
            return
        candidate.resident_layers, candidate.sweep_bytes = engine.plan.resident_layers, engine.plan.sweep_bytes
        if settings.throttle is not None:
            internals.set_rate(engine, settings.throttle.bytes_per_second)
        names = [PLAIN] if candidate.exit_layer is None else [name for name in settings.contenders if name != PLAIN]
        results = take_turns([EngineContender(name, engine) for name in names], course, no_progress)
        for name, repeats in results.items():
            candidate.runs.setdefault(name, []).extend(repeats[0])
        if candidate.exit_layer is not None and candidate.draft_step_seconds is None:
            step = internals.draft_step_seconds(engine, course.prompt_ids[:1], course.params)
            candidate.draft_step_seconds = step
    finally:
        engine.close()


def _row(candidate: _Candidate, plain: _Candidate) -> dict[str, Any]:
    expected, figures = [run.ids for run in plain.runs.get(PLAIN, [])], {}
    for name, runs in candidate.runs.items():
        stats = total_stats([runs])
        figures[name] = {
            "tokens_per_second": round(rate(runs), DIGITS),
            "tau": round(stats.tau, DIGITS),
            "drafted_per_round": round(stats.drafted / stats.rounds, DIGITS) if stats.rounds else 0.0,
            "identical": [run.ids for run in runs] == expected,
        }
    best = max(figures, key=lambda name: figures[name]["tokens_per_second"], default=None)
    base = rate(plain.runs.get(PLAIN, []))
    speed = figures[best]["tokens_per_second"] if best is not None else 0.0
    return {
        "exit_layer": candidate.exit_layer,
        "note": candidate.note,
        "resident_layers": candidate.resident_layers,
        "sweep_bytes": candidate.sweep_bytes,
        "draft_step_seconds": candidate.draft_step_seconds,
        "controllers": figures,
        "best_controller": best,
        "tokens_per_second": speed,
        "of_plain": round(speed / base, DIGITS) if base else None,
    }
