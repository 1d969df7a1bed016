"""Defaults of `eesd-chat` from a file that the user writes, with a section per model.

~/.config/eesd-lite/config.toml (or under XDG_CONFIG_HOME, or the file that EESD_CONFIG names) holds options by their
long names, without the dashes in front. What the command line or a variable says comes first, then the section of the
model, then the rest of the file.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

NOT_IN_FILE = ("prompt", "config", "help")
_SECTIONS = "models"


def config_path() -> Path:
    """Where the file is looked for."""
    named = os.environ.get("EESD_CONFIG")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".config") / "eesd-lite" / "config.toml"


def apply_config(context: click.Context, options: dict[str, Any]) -> frozenset[str]:
    """Fill options that neither the command line nor a variable gave; the names of those that they gave.

    Raises click.UsageError with file and key for anything in the file that is not right.
    """
    path = config_path()
    table = _read(path)
    given = {name for name in options if context.get_parameter_source(name) not in _DEFAULTS}
    parameters = {p.name: p for p in context.command.params if p.name and p.name not in NOT_IN_FILE}
    sections = table.pop(_SECTIONS, {})
    if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
        raise click.UsageError(f'{path}: [{_SECTIONS}] holds one section per model, as [{_SECTIONS}."smollm2-135m"]')
    model = options.get("model") or table.get("model")
    _fill(context, options, given, parameters, table, path)
    section = sections.get(model, {}) if isinstance(model, str) else {}
    _fill(context, options, given, parameters, section, path)
    for name, other in sections.items():  # a mistake shows at once, not on the day that model is used
        _check_keys(other, parameters, path, name)
    return frozenset(given)


_DEFAULTS = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)


def _fill(
    context: click.Context,
    options: dict[str, Any],
    given: set[str],
    parameters: Mapping[str, click.Parameter],
    table: Mapping[str, Any],
    path: Path,
) -> None:
    _check_keys(table, parameters, path, "")
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in given:
            continue
        parameter = parameters[name]
        flag = isinstance(parameter, click.Option) and parameter.is_flag
        if flag != isinstance(value, bool):
            raise click.UsageError(
                f"{path}: {key} must {'be true or false' if flag else 'have a value'}, not {value!r}"
            )
        if parameter.multiple if isinstance(parameter, click.Option) else False:
            value = [value] if isinstance(value, str) else value
        try:
            value = parameter.process_value(context, value)
            options[name] = parameter.callback(context, parameter, value) if parameter.callback else value
        except click.ClickException as error:
            raise click.UsageError(f"{path}: {key}: {error.message}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise click.UsageError(f"{path}: {key} cannot be {value!r}") from error


def _check_keys(table: Mapping[str, Any], parameters: Mapping[str, click.Parameter], path: Path, section: str) -> None:
    for key in table:
        if key.replace("-", "_") not in parameters:
            names = [str(name).replace("_", "-") for name in parameters]
            near = difflib.get_close_matches(key.replace("_", "-"), names, n=1, cutoff=0.4)
            where = f"{path}, models.{section}" if section else str(path)
            hint = f"did you mean {near[0]}?" if near else "see eesd-chat --help for the options"
            raise click.UsageError(f"{where}: there is no option {key!r}; {hint}")


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get("EESD_CONFIG"):
            raise click.UsageError(f"EESD_CONFIG names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise click.UsageError(f"{path} is not valid TOML: {error}") from error
