"""Errors, progress and figures as text."""

from __future__ import annotations

import errno
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner, Result

from cli.common import reports_errors
from cli.interrupts import Interrupts
from cli.render import ProgressDisplay, answer_line, printable, totals
from eesd_lite.errors import BudgetError
from eesd_lite.stats import Stats
from models import RecipeError
from quant.errors import CheckpointError


def run(function: Callable[[], None]) -> Result:
    return CliRunner().invoke(click.command("eesd")(reports_errors(function)), prog_name="eesd")


def raising(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("kind", [BudgetError, CheckpointError, RecipeError])
def test_errors_that_users_can_cause_are_one_line_and_exit_code_1(kind: type[Exception]) -> None:
    result = run(raising(kind("12 bytes are missing;\n  ask for more")))
    assert (result.exit_code, result.output) == (1, "eesd: error: 12 bytes are missing; ask for more\n")


def test_errors_of_the_system_name_the_file() -> None:
    result = run(raising(OSError(errno.ENOSPC, "No space left on device", "/tmp/x")))
    assert (result.exit_code, result.output) == (1, "eesd: error: No space left on device: /tmp/x\n")


def test_ctrl_c_is_exit_code_130_and_one_line() -> None:
    result = run(raising(KeyboardInterrupt()))
    assert result.exit_code == 130
    assert result.output == "eesd: interrupted; nothing half-written is left, the same command goes on\n"


def test_bugs_keep_their_traceback() -> None:
    assert isinstance(run(raising(ZeroDivisionError())).exception, ZeroDivisionError)


def test_progress_in_a_log_is_a_line_when_a_stage_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    now = [1.0]
    display = ProgressDisplay(clock=lambda: now[0])
    with display.showing("loading"):
        for second, done in ((1.5, 0), (3.5, 1), (5.0, 2), (9.0, 3)):
            now[0] = second
            display("layer", done, 4)
    display("after the end", 1, 1)
    assert capsys.readouterr().err.splitlines() == ["eesd: loading", "eesd: layer 1/4", "eesd: layer 3/4"]


def test_work_that_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay().showing("a moment", delay=0.4) as display:
        display("a moment", 1, 2)
    assert capsys.readouterr().err == ""


def test_control_characters_are_spelt_out_and_text_is_left_alone() -> None:
    assert printable("caf\u00e9 \U0001f642\tx\n") == "caf\u00e9 \U0001f642\tx\n"
    assert printable("\x1b[31m\x07\x9b\u202e\r") == "^[[31m^G<U+009B><U+202E>^M"


def test_the_line_after_an_answer_has_the_figures_of_that_answer() -> None:
    stats = Stats(emitted=8, prefill_emitted=1, decode_seconds=3.5, prefilled_tokens=30, prefill_seconds=0.25)
    stats.count_round(drafted=5, accepted=4)
    stats.count_round(drafted=2, accepted=1)
    stats.verify_offloaded_bytes, stats.prefill_offloaded_bytes = 3 << 20, 1 << 20
    assert answer_line(stats, 0.25, "stopped") == (
        "8 tokens, 2.0 tokens/s, tau 3.50, draft 3.5, 512 KiB/token, first after 0.2 s, stopped"
    )
    assert answer_line(Stats(emitted=1)) == "1 token, 0.0 tokens/s, 0 B/token"


def test_totals_show_the_histogram_and_the_controllers_belief() -> None:
    stats = Stats(emitted=4, prompt_tokens=30, prefilled_tokens=20, prefill_seconds=2.0, sweeps=3)
    stats.count_round(drafted=2, accepted=1)
    stats.count_round(drafted=2, accepted=2)
    stats.count_round(drafted=2, accepted=2)
    stats.verify_offloaded_bytes = 6 << 20
    belief = {"rate": 0.25, "round_seconds": [0.5, 1], "levels": [{"up_to": 0.5, "n": 3}, {"up_to": 1.0, "n": 0}]}
    assert totals(stats, belief) == [
        "answers    4 tokens at 0.0 tokens/s",
        "seconds    2.0 reading prompts, 0.0 decoding (0.0 drafting, 0.0 waiting for layers)",
        "prompts    30 tokens, of which 20 were read (10 tokens/s), the others were in the cache",
        "read       6.00 MiB of offloaded weights in 3 sweeps, 1.50 MiB a token",
        "rounds     3, tau 2.67; 2.0 drafted a round, 83% of them kept",
        "rounds by the number of drafts that were kept:",
        f"  1  1  {'#' * 20}",
        f"  2  2  {'#' * 40}",
        "the controller believes:",
        "  rate: 0.25",
        "  round seconds: 0.5 1",
        "  levels:  up to  n",
        "             0.5  3",
        "               1  0",
    ]
    assert len(totals(Stats(), {})) == 4


def test_ctrl_c_raises_while_waiting_and_is_noted_elsewhere() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)  # while a token is printed: no exception
        assert interrupts.pending
        with pytest.raises(KeyboardInterrupt), interrupts.waiting():
            raise AssertionError("not reached: the wish is fulfilled before more work begins")
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.waiting():
        signal.raise_signal(signal.SIGINT)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a second one is meant
    assert signal.getsignal(signal.SIGINT) is before
