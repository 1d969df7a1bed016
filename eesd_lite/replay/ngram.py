"""A trace of look-ups in the text, made from a recorded trace's ids: what `--drafter ngram` drafts without a head."""

from __future__ import annotations

from eesd_lite.replay.curves import verify_by_rows
from eesd_lite.replay.trace import Answer, Position, Trace


def ngram_trace(trace: Trace) -> Trace:
    """The same answers with drafts from repeated text, and costs without an exit layer: a draft step costs nothing,
    and a verify runs all layers over all rows. A sweep is still counted in draft steps of the recorded head."""
    steps = trace.about["seconds"]
    lower, verify = float(steps["lower"]), verify_by_rows(steps)
    seconds = {
        "lower": 0.0,
        "head": 0.0,
        "unit": lower + float(steps["head"]),
        "verify": [rows * (1.0 + lower / verify[0]) for rows in verify],
    }
    longest = int(trace.about["params"]["max_new_tokens"])
    answers = tuple(_look_up(answer, trace.k_max, longest) for answer in trace.answers)
    about = {name: value for name, value in trace.about.items() if name != "acceptance"}  # is about the head
    return Trace({**about, "drafter": "ngram", "seconds": seconds}, answers)


def _look_up(answer: Answer, k_max: int, longest: int) -> Answer:
    from eesd_lite.ngram_drafter import LEAST, NgramIndex  # pulls in torch

    index, text, found = NgramIndex(), [*answer.prompt, *answer.answer], []
    for place in range(len(answer.answer) - 1):
        visible = text[: len(answer.prompt) + place + 1]
        index.learn(visible)
        tokens: list[int] = []
        beliefs: list[float] = []
        while len(tokens) < min(k_max, longest - place - 2):
            match = next((match for match in index.matches() if match.belief >= LEAST), None)
            if match is None:
                break
            tokens.append(match.token)
            beliefs.append(match.belief)
            index.follow([*visible, *tokens])
        index.follow(visible)
        truth = text[len(visible) :]
        accepted = 0
        while accepted < min(len(tokens), len(truth)) and tokens[accepted] == truth[accepted]:
            accepted += 1
        found.append(Position(place, tuple(tokens), tuple(beliefs), accepted))
    return Answer(answer.prompt, answer.answer, tuple(found))
