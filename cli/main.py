"""`eesd`: one command group. A subcommand's module is imported when it is asked for, not for the list of commands."""

from __future__ import annotations

import click

from cli.start import start
from eesd_lite import __version__

SUBCOMMANDS = {
    "fetch": "Prepare a known model, or list the known models.",
    "inspect": "What a model folder is, from its headers.",
    "plan": "Where a model's layers would lie in given memory, and what that costs.",
    "quantize": "Quantize a 16-bit model to 4-bit GPTQ.",
    "synth": "Write a random model of true shape and size.",
    "train": "Train exit heads for a model on its own text.",
    "bench": "Measure plain decoding against drafting; `bench offload`: under real memory limits.",
    "tree": "Draw one round: the token tree, what was accepted, where the seconds went.",
    "trace": "Record what an exit head would draft at every position.",
    "replay": "Compare controllers on a recorded trace, under injected costs.",
    "eval": "Perplexity of a model, and its KL divergence from a reference.",
    "cache": "List or remove prepared models.",
}


class _Lazy(click.Group):
    """Knows the names and one line about each; imports a module for the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # One import statement each, so that tools see who imports what.
        command: click.Command | None = None
        if cmd_name == "fetch":
            from cli.fetch import fetch

            command = fetch
        elif cmd_name == "inspect":
            from cli.inspect_model import inspect

            command = inspect
        elif cmd_name == "plan":
            from cli.plan import plan

            command = plan
        elif cmd_name == "quantize":
            from cli.quantize import quantize

            command = quantize
        elif cmd_name == "synth":
            from cli.synth import synth

            command = synth
        elif cmd_name == "train":
            from cli.train import train

            command = train
        elif cmd_name == "bench":
            from cli.bench import bench

            command = bench
        elif cmd_name == "tree":
            from cli.tree import tree

            command = tree
        elif cmd_name == "trace":
            from cli.trace import trace

            command = trace
        elif cmd_name == "replay":
            from cli.replay import replay

            command = replay
        elif cmd_name == "eval":
            from cli.eval import evaluate

            command = evaluate
        elif cmd_name == "cache":
            from cli.cache import cache

            command = cache
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # `bench` takes a model; a folder of this name is written ./offload.
        if args[:2] == ["bench", "offload"]:
            from cli.bench_offload import bench_offload

            return "bench offload", bench_offload, args[2:]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.group("eesd", cls=_Lazy)
@click.version_option(__version__, prog_name="eesd-lite")
def eesd() -> None:
    """Prepare, train, measure: everything around `eesd-chat`."""


def main() -> None:
    """The installed program `eesd`."""
    start(eesd, "eesd")


if __name__ == "__main__":
    main()
