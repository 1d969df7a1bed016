"""Interleaving: for every repeat and every prompt, each contender takes one turn.

A machine's speed drifts over minutes (heat, neighbours, caches). Turns put every contender into the same minutes, and
the order rotates, so that nobody always runs first. Before that, everyone warms up, unmeasured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from eesd_lite.bench.contenders import Contender, Run
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress

Results = Mapping[str, list[list[Run]]]  # name -> [repeat][prompt]


@dataclass(frozen=True)
class Course:
    """What everybody has to run."""

    prompt_ids: Sequence[Sequence[int]]
    params: SamplingParams
    repeat: int
    warmup_tokens: int


def take_turns(
    contenders: Sequence[Contender],
    course: Course,
    progress: Progress,
    *,
    after_prompt: Callable[[int], None] = lambda repeat: None,
) -> Results:
    """Runs the course; `after_prompt` is called with the repeat's number when all have answered a prompt."""
    _warm_up(contenders, course, progress)
    results: dict[str, list[list[Run]]] = {contender.name: [] for contender in contenders}
    answered = [_count(contender, course) for contender in contenders]
    total, done, turn = course.repeat * sum(answered), 0, 0
    for repeat in range(course.repeat):
        for runs in results.values():
            runs.append([])
        for number, ids in enumerate(course.prompt_ids):
            first = turn % len(contenders)
            turn += 1
            for contender in (*contenders[first:], *contenders[:first]):
                if number >= _count(contender, course):
                    continue
                stage = f"repeat {repeat + 1}/{course.repeat}, prompt {number + 1}, {contender.name}"
                progress(stage, done, total)
                results[contender.name][repeat].append(contender.run(ids, course.params))
                done += 1
            after_prompt(repeat)
    progress("measured", total, total)
    return results


def _count(contender: Contender, course: Course) -> int:
    available = len(course.prompt_ids)
    return available if contender.prompts is None else min(contender.prompts, available)


def _warm_up(contenders: Sequence[Contender], course: Course, progress: Progress) -> None:
    if not course.warmup_tokens:
        return
    params = replace(course.params, max_new_tokens=min(course.warmup_tokens, course.params.max_new_tokens))
    for number, contender in enumerate(contenders):
        progress(f"warming up {contender.name}", number, len(contenders))
        contender.run(course.prompt_ids[0], params)
