"""`eesd plan`: where every layer of a model would lie, what is allocated for it, and what a sweep would cost.

Needs no weights with --shape, reads headers only for a model, and never imports torch unless a CUDA device is asked
what it has free.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from cli.common import ExitLayer, Number, Rate, Size, draft_vocab_option, head_bits_option, reports_errors
from eesd_lite.exit_choice import AUTO
from eesd_lite.tiers import HOST_MODES
from eesd_lite.units import format_size

if TYPE_CHECKING:
    from eesd_lite.planning import PlannedModel, PlanWishes

PRESETS = ("8gb", "12gb", "16gb", "24gb")


class DeviceSize(Size):
    """A size, or `auto`, which depends on the device and so waits until that is known."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        automatic = isinstance(value, str) and value.strip().lower() == "auto"
        return "auto" if automatic else super().convert(value, param, ctx)


class Agreements(click.ParamType):
    """Exit layers and the agreement of their heads."""

    name = "agreements"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return tuple(value)
        found = {}
        for part in value.split(","):
            layer, _, share = part.partition("=")
            try:
                twice, found[int(layer)] = int(layer) in found, float(share)
            except ValueError:
                self.fail(f"cannot read {part.strip()!r}; write for example 13=0.53,26=0.7", param, ctx)
            if twice:
                self.fail(f"exit layer {int(layer)} is named twice", param, ctx)
            if int(layer) < 1 or not 0 <= float(share) <= 1:
                self.fail(f"{part.strip()!r}: layers count from 1, an agreement is from 0 to 1", param, ctx)
        return tuple(sorted(found.items()))


@click.command("plan", short_help="Where a model's layers would lie, and what that costs.")
@click.argument("model", required=False)
@click.option("--shape", metavar="NAME", help="Plan for a well-known shape, without weights; a wrong name lists them.")
@click.option("--group-size", type=int, help="With --shape: inputs that share a scale.  [default: the usual]")
@click.option("--weights", metavar="FILE", help="With MODEL: which file or index, where its folder holds several.")
@click.option("--quantize", type=click.Choice(["nf4", "fp4"]), help="With a 16-bit MODEL: as it would be loaded so.")
@click.option("--preset", type=click.Choice(PRESETS), help="A card of that size in an ordinary desktop.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda with --preset or --host-memory]")
@click.option("--device-memory", type=DeviceSize(), help="All that is allocated there: 8GiB, 8GB, bytes, auto.")
@click.option("--host-memory", type=Size(), help="For layers beyond the device's, with a CUDA device.")
@click.option("--host-mode", type=click.Choice(HOST_MODES), default="stream", show_default=True,
              help="Layers in host memory are streamed, or computed by the CPU, or balanced by the rates.")  # fmt: skip
@click.option("--context", type=click.IntRange(min=1), help="Tokens.  [default: 2048, or less if the model has less]")
@click.option("--exit-layer", type=ExitLayer(0), help="Draft at this layer; 0: not at all; auto: what promises most.")
@click.option("--head", metavar="PATH", help="With MODEL: a head file or a folder of them.  [default: the model's own]")
@click.option("--agreement", type=Agreements(), metavar="N=SHARE,...", default=(),
              help="With auto: heads supposed to be there, by exit layer, as 13=0.53,26=0.7.")  # fmt: skip
@draft_vocab_option
@head_bits_option
@click.option("--resident-layers", type=click.IntRange(min=0), help="Fix the split by hand.")
@click.option("--draft-limit", type=click.IntRange(1, 64), default=16, show_default=True, help="Longest draft.")
@click.option("--link-rate", type=Rate(), default="25GB", show_default=True, help="Host to device, a second.")
@click.option("--disk-rate", type=Rate(), default="3GB", show_default=True, help="Disk to host, a second.")
@click.option("--host-rate", type=Rate(), default="20GB", show_default=True,
              help="Packed weights that the CPU multiplies, a second.")  # fmt: skip
@click.option("--device-rate", type=Rate(),
              help="For auto: resident weights multiplied, a second.  [default: 20GB, a card 400GB]")  # fmt: skip
@click.option("--layer-time", type=click.IntRange(min=0), default=100, show_default=True, metavar="MICROSECONDS",
              help="For auto: a pass through a layer beside that.")  # fmt: skip
@click.option("--token-time", type=click.IntRange(min=0), default=500, show_default=True, metavar="MICROSECONDS",
              help="For auto: a token, drafted or emitted, beside products.")  # fmt: skip
@click.option("--row", type=Number(0, 1), metavar="SHARE",
              help="For auto: what one more row of a pass takes, of one.  [default: 0.3, a card 0]")  # fmt: skip
@click.option("--tau", type=Number(min=1), default=2.3, show_default=True, help="Tokens per sweep.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@reports_errors
def plan(
    model: str | None, shape: str | None, *, tau: float, as_json: bool, group_size: int | None, **given: Any
) -> None:
    """Print the plan for MODEL (a recipe's name, a folder, or a Hub id in the cache), or for --shape NAME."""
    from eesd_lite.planning import plan_model, plan_shape

    if (model is None) == (shape is None):
        raise click.UsageError("give either MODEL or --shape NAME")
    if given["weights"] is not None and model is None:
        raise click.UsageError("--weights goes with MODEL")
    if given["head"] is not None and model is None:
        raise click.UsageError("--head goes with MODEL")
    if given["agreement"] and given["exit_layer"] != AUTO:
        raise click.UsageError("--agreement goes with --exit-layer auto")
    if group_size is not None and (shape is None or not (group_size == -1 or group_size >= 32)):
        raise click.UsageError("--group-size goes with --shape, and is -1 or at least 32")
    wishes = _wishes(given)
    if shape is not None:
        planned = plan_shape(shape, wishes, group_size=group_size)
    else:
        planned = plan_model(model or "", wishes, weights=given["weights"])
    click.echo(json.dumps(as_dict(planned, tau)) if as_json else "\n".join(lines(planned, tau)))


def _wishes(given: dict[str, Any]) -> PlanWishes:
    from eesd_lite.plan_cost import Rates
    from eesd_lite.planning import PlanWishes

    device = given["device"]
    if device is None:
        device = "cuda" if given["preset"] or given["host_memory"] is not None else "cpu"
    if device == "cpu" and given["preset"]:
        raise click.UsageError("--preset is for --device cuda; on a CPU all memory is device memory")
    linked = device == "cuda" or given["host_memory"] is not None
    rates = Rates(
        link=given["link_rate"] if linked else None, disk=given["disk_rate"], host=given["host_rate"],
        device=given["device_rate"], layer_time=given["layer_time"], token_time=given["token_time"],
        row=given["row"],
    )  # fmt: skip
    wishes = PlanWishes.preset(given["preset"]) if given["preset"] else PlanWishes(device=device)
    names = ("context", "exit_layer", "resident_layers", "draft_limit", "host_mode", "head", "head_bits", "draft_vocab")
    own: dict[str, Any] = {name: given[name] for name in names}
    own["agreements"] = given["agreement"]
    if given["device_memory"] is not None:  # a size that is given leaves no reserve: it says what may be used
        own |= {"device_memory": _bytes(given["device_memory"], device), "reserve": 0}
    if given["host_memory"] is not None:
        own |= {"host_memory": given["host_memory"], "host_reserve": 0}
    return replace(wishes, rates=rates, quantize=given["quantize"] is not None, **own)


def _bytes(size: int | str, device: str) -> int:
    from eesd_lite.units import available_device_memory, available_memory

    if not isinstance(size, str):
        return size
    return available_memory() if device == "cpu" else available_device_memory()


def lines(planned: PlannedModel, tau: float) -> list[str]:
    """The plan for people."""
    from cli.plan_table import exit_lines, plan_lines

    plan, cost = planned.plan, planned.cost
    drafts = f"drafts at exit layer {plan.exit_layer}" if plan.exit_layer else "plain decoding"
    if plan.other_exits:
        drafts += f", or {', '.join(map(str, plan.other_exits))}"
    out = [f"{planned.name}: {len(plan.tiers)} layers, context {plan.context}, {drafts}", *plan_lines(plan)]
    out += [f"  free on the device: {_free(planned.request.device_memory, plan.total_bytes)}"]
    carried = [
        f"{name} {format_size(size)} in {seconds:.3f} s"
        for name, size, seconds in (
            ("disk", cost.disk_bytes, cost.disk_seconds),
            ("link", cost.link_bytes, cost.link_seconds),
            ("CPU", cost.host_bytes, cost.host_seconds),
        )
        if size
    ]
    if carried:
        rate, plain = cost.tokens_per_second(tau), cost.tokens_per_second(1)
        assert rate is not None and plain is not None
        out += [
            f"a sweep: {', '.join(carried)}; {cost.seconds:.3f} s if they overlap",
            f"at most {rate:.2f} tokens/s at tau {tau:g}, {plain:.2f} without drafting (transfers alone; an estimate)",
        ]
    else:
        out.append("nothing is offloaded: no transfer bounds the speed")
    out.append(f"exit layers that could draft within these budgets: {_range(planned.draft_capable)}")
    if planned.exits is not None:
        out += exit_lines(planned.exits)
    if planned.heads:
        out.append(f"exit heads that are there: {', '.join(map(str, planned.heads))}")
    return out + [f"note: {note}" for note in planned.notes]


def _free(budget: int | None, used: int) -> str:
    return "no limit given" if budget is None else f"{format_size(budget - used)} of {format_size(budget)}"


def _range(layers: range) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else "none"


def as_dict(planned: PlannedModel, tau: float) -> dict[str, Any]:
    """The same for programs, all sizes in bytes."""
    plan, cost = planned.plan, planned.cost
    return {
        "model": planned.name,
        "plan": {**asdict(plan), "items": dict(plan.items), "host_items": dict(plan.host_items)},
        "device_memory": planned.request.device_memory,
        "host_memory": planned.request.host_memory,
        "tier_bytes": {tier: plan.tier_bytes(tier) for tier in sorted(set(plan.tiers))},
        "sweep": {**asdict(cost), "seconds": cost.seconds},
        "tau": tau,
        "tokens_per_second": cost.tokens_per_second(tau),
        "tokens_per_second_plain": cost.tokens_per_second(1),
        "draft_capable": list(planned.draft_capable),
        "heads": list(planned.heads),
        "exits": planned.exits.as_dict() if planned.exits is not None else None,
        "notes": list(planned.notes),
    }
