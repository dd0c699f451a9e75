"""The command line: what ``python -m memtrain`` accepts, turned into one composed configuration per job.

Hydra's Compose API does the composing. Its ``hydra.main`` is not used: it writes folders and files of its own
(``multirun.yaml`` cannot be switched off), and up to 1.3.8 its argument parser fails on Python 3.14 (hydra issue 3121).
Before Hydra sees the overrides, three things that people type are put into its terms:

- ``recipe=./mine.yaml`` becomes the name under which that file is registered;
- ``plan.activations=recompute``, the option of a union, becomes the group choice ``plan/activations=recompute``;
- ``model.config.KEY=value`` may add a key, since a model's configuration is free-form.

Whatever Hydra or OmegaConf then refuses is said again in one sentence that names the nearest keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from memtrain.config import CONFIGS, RECIPES, default_run_dir, recipes
from memtrain.machine import not_described
from memtrain.schema import ALTERNATIVES, NONE, Schema, register_schema, with_nulls

_FREE_FORM = ("model.config.", "model.settings.")
_KINDS = {"Integer": "a whole number", "Float": "a number"}
_SECTIONS = [key for key, schema in get_type_hints(Schema).items() if dataclasses.is_dataclass(schema)]

_EXAMPLES = """\
examples:
  python -m memtrain                                      train the quickstart
  python -m memtrain mode=plan budget=300MiB              choose a plan, explain it and stop
  python -m memtrain mode=data data.path=chat.jsonl       what is in your rows, and what is learnt of them
  python -m memtrain mode=optimizers model=llama2_7b      what each optimizer takes of memory
  python -m memtrain recipe=./mine.yaml steps=500         a recipe of your own
  python -m memtrain data.path=book.txt                   your own text
  python -m memtrain recipe=7b_24gb mode=plan             plan for a card that need not be here
  python -m memtrain plan.activations=recompute plan.activations.every=2
  python -m memtrain -m budget=200MiB,400MiB              two jobs, one after another\
"""


def parser() -> argparse.ArgumentParser:
    """The flags and overrides, a subset of Hydra's own. Parse with ``parse_intermixed_args``."""
    made = argparse.ArgumentParser(prog="python -m memtrain", add_help=False, allow_abbrev=False)
    made.add_argument("overrides", nargs="*", metavar="key=value", help="set a key, or choose the option of a group")
    made.add_argument("-h", "--help", action="store_true", help="list the recipes and keys, and stop")
    made.add_argument("-c", "--cfg", choices=["job"], help="print the composed configuration, and stop")
    made.add_argument("-m", "--multirun", action="store_true", help="one job for each combination of the values a,b,c of a key")
    return made


def help_text() -> str:
    """What ``--help`` prints: flags, recipes, keys and examples."""
    unions = [(f"{group.replace('/', '.')}=", _describe_options(group), "") for group in ALTERNATIVES]
    unions += [(f"{group}=", " | ".join(_files(group)), "") for group in _SECTIONS if _files(group)]
    keys = [(f"{key}=", sentence, f" [{default}]" if default else "") for key, sentence, default in _described_keys(Schema)]
    parts = [
        parser().format_help().rstrip(),
        "recipes (recipe=NAME, or recipe=FILE.yaml for your own):\n"
        + _table((name, text, "") for name, text in recipes().items()),
        "keys, with their defaults where the recipe sets none:\n" + _table(keys),
        "options, with the keys each has below it:\n" + _table(unions),
        _EXAMPLES,
    ]
    return "\n\n".join(parts)


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Two columns, the second wrapped at the width of the terminal."""
    width = max(60, shutil.get_terminal_size().columns)
    indent = " " * 36
    return "\n".join(
        textwrap.fill(f"  {name:<34}{text}{default}", width, subsequent_indent=indent, break_on_hyphens=False)
        for name, text, default in rows
    )


def _files(group: str) -> list[str]:
    """The options of a group that are files."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _describe_options(group: str) -> str:
    described = []
    for option in ALTERNATIVES[group].classes:
        settings = ALTERNATIVES[group].settings(option)
        described.append(f"{option} ({', '.join(settings)})" if settings else option)
    return " | ".join(described)


def _described_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key in dataclasses.fields(schema):
        nested = get_type_hints(schema)[key.name]
        if dataclasses.is_dataclass(nested):
            yield from _described_keys(cast(type, nested), f"{prefix}{key.name}.")
        elif "sentence" in key.metadata:
            shown = "" if key.default in (None, "???", dataclasses.MISSING) else str(key.default)
            yield f"{prefix}{key.name}", key.metadata["sentence"], shown


def compose_jobs(overrides: Sequence[str], *, multirun: bool) -> list[DictConfig]:
    """Compose one configuration per job; without ``multirun`` there is exactly one.

    In a multirun each job gets its own folder below ``run.dir``, named by its number.

    Raises:
        ValueError: one sentence, for whatever is wrong with an override or a recipe.
    """
    register_schema()
    started = datetime.now()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
            parsed = _parse(overrides)
            if not multirun:
                return [_compose(_without_sweeps(parsed))]
            jobs = [_compose(job) for job in _sweep(parsed)]
            for number, cfg in enumerate(jobs):
                cfg.run.dir = str(Path(cfg.run.dir or default_run_dir(cfg.recipe, started)) / str(number))
            return jobs
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_sentence(error)) from error


def _parse(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def _without_sweeps(overrides: Sequence[Override]) -> Sequence[Override]:
    for override in overrides:
        if override.is_sweep_override():
            text = str(override.input_line)
            raise ValueError(
                f"{text} names several jobs: add -m to run them all, write a list as [a,b], or quote one value: {_quoted(text)}."
            )
    return overrides


def _sweep(overrides: Sequence[Override]) -> Iterator[Sequence[Override]]:
    values = []
    for override in overrides:
        if override.is_interval_sweep():
            raise ValueError(
                f"{override.input_line} is an interval, and jobs need single values: list them as a,b,c or range(a,b)."
            )
        if override.is_sweep_override():
            values.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            values.append([str(override.input_line)])
    return (_parse(job) for job in itertools.product(*values))


def _compose(overrides: Sequence[Override]) -> DictConfig:
    chosen: dict[str, str] = {}
    rewritten = [text for override in overrides for text in _rewrite(override, chosen)]
    # A length given here takes the place of the recipe's, in whichever unit that is.
    given = {override.key_or_group for override in overrides}
    for length, other in (("steps", "epochs"), ("epochs", "steps")):
        if length in given and other not in given:
            rewritten.append(f"{other}=null")
    # Registered anew for each job: what a recipe may say about a union depends on the option that the job chooses.
    for name in recipes():
        _register_recipe(RECIPES / f"{name}.yaml", "recipe", chosen)
    for override in overrides:
        if override.key_or_group == "recipe":
            rewritten.append(f"recipe={_recipe_option(str(override.value()), chosen)}")
    return compose("run", overrides=rewritten)


def _rewrite(override: Override, chosen: dict[str, str]) -> list[str]:
    """The override in Hydra's terms, none for the recipe; chosen options are noted in ``chosen``."""
    text, key, value = str(override.input_line), override.key_or_group, override.value()
    if text.partition("=")[2].strip() == NONE:
        text, value = f"{key}=null", None
    free_form = f"{key}.".startswith(_FREE_FORM)
    if override.is_delete():
        if free_form:
            return [text]
        raise ValueError(f"{text} would delete a key that memtrain reads: set it, as in {key}=null.")
    if re.match(r"hydra[./]", key) and key != "hydra.searchpath":
        raise ValueError(f"{text} has no effect here: memtrain runs its jobs itself and writes only into run.dir.")
    if key == "recipe":
        return []
    union = key.replace(".", "/")
    parent, _, last = union.rpartition("/")
    if parent in ALTERNATIVES and last == ALTERNATIVES[parent].tag:
        union = parent
    if union in ALTERNATIVES:
        option, settings = _choice(union, value)
        rewritten = [f"{union.replace('/', '.')}.{name}={json.dumps(setting)}" for name, setting in settings.items()]
        if option is not None:
            chosen[union] = option
            rewritten.insert(0, f"{union}={option}")
        return rewritten
    if key in _SECTIONS and not isinstance(value, dict):
        options = GlobalHydra.instance().config_loader().get_group_options(key)
        if not options or not isinstance(value, str):
            rule = f"one of {', '.join(options)}" if options else f"set key by key, as in {key}.KEY=VALUE"
            raise ValueError(f"{key} is {_shown(value)}, and it must be {rule}.")
        chosen[key] = value
    # Every other key exists already, so Hydra's + has nothing to add.
    return [f"++{text.lstrip('+')}" if free_form else text.lstrip("+")]


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def _choice(group: str, written: Any) -> tuple[str | None, dict[str, Any]]:
    """The option and the settings in NAME, ``{TAG: NAME, setting: value}`` or null."""
    alternatives, settings = ALTERNATIVES[group], {}
    option = written
    if isinstance(written, Mapping):
        settings = dict(written)
        if alternatives.tag not in settings:
            return None, settings
        option = settings.pop(alternatives.tag)
    if option is None and "auto" in alternatives.classes:
        option = "auto"
    if not isinstance(option, str) or option not in alternatives.classes:
        raise ValueError(
            f"{group.replace('/', '.')} is {_shown(option)}, and it must be one of {', '.join(alternatives.classes)}."
        )
    return option, settings


def _recipe_option(name: str, chosen: Mapping[str, str]) -> str:
    """The name under which Hydra finds the recipe ``name``, which may be a file of the user's."""
    if not name.endswith((".yaml", ".yml")):
        if name not in recipes():
            raise ValueError(f"there is no recipe {name!r}: {_nearest(name, recipes()) or _the_recipes()}")
        return name
    path = Path(name).resolve()
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.y*ml")]
        near = _did_you_mean(get_close_matches(path.name, others)) or "give the path of a YAML file, or the name of a recipe."
        raise ValueError(f"there is no recipe file {name}: {near}")
    # The whole path is the option's name, so that no file can take the name of another or of a recipe of ours.
    group = f"recipe{path.parent.as_posix()}"
    _register_recipe(path, group, chosen)
    option = f"{group}/{path.stem}".removeprefix("recipe/")
    return "'" + option.replace("'", r"\'") + "'"


def _the_recipes() -> str:
    return f"the recipes are {', '.join(recipes())}."


def _register_recipe(path: Path, group: str, chosen: Mapping[str, str]) -> None:
    """Make the recipe at ``path`` an option of ``group`` that sets keys from the top (``# @package _global_``).

    A recipe may name options in its body as on the command line; they become choices in its defaults list. Where the
    command line chooses another option of a union, what the recipe sets for its own one alone is left out. A device is
    described whole: one that the command line chooses takes the place of the recipe's.
    """
    body = _load(path)
    body["recipe"] = path.stem
    choices = body.setdefault("defaults", [])
    if "device" in chosen and isinstance(body.get("device"), dict):
        del body["device"]
    for section in _SECTIONS:
        if isinstance(body.get(section), str):
            choices.append({f"override /{section}": body.pop(section)})
    for union, alternatives in ALTERNATIVES.items():
        parent, _, leaf = union.rpartition("/")
        holder = body.get(parent) if parent else body
        if not isinstance(holder, dict) or leaf not in holder:
            continue
        option, settings = _choice(union, holder.pop(leaf))
        if option is not None:
            choices.append({f"override /{union}": option})
        if union in chosen:
            of_others = {name for other in alternatives.classes for name in alternatives.settings(other)}
            of_others -= set(alternatives.settings(chosen[union]))
            settings = {name: value for name, value in settings.items() if name not in of_others}
        holder[leaf] = settings
    ConfigStore.instance().store(group=group, name=path.stem, node=OmegaConf.create(body), package="_global_")


def _load(path: Path) -> dict[str, Any]:
    try:
        written = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"recipe {path}{line} is not valid YAML: {error.problem}.") from error
    body = OmegaConf.to_container(written)
    if not isinstance(body, dict):
        raise ValueError(f"recipe {path} holds a list, and a recipe must hold keys with values.")
    body = with_nulls(body)
    for key in body:
        if "." in str(key):
            group, _, name = str(key).rpartition(".")
            raise ValueError(
                f"recipe {path} has the key {key!r}, which only the command line takes: write {name} below {group}."
            )
    if not isinstance(body.get("defaults", []), list):
        raise ValueError(f"recipe {path} has defaults that are not a list: write one line '- override /GROUP: NAME' for each.")
    return cast(dict[str, Any], body)


def _known_keys() -> list[str]:
    keys = [key for key, _, _ in _described_keys(Schema)]
    for group, alternatives in ALTERNATIVES.items():
        dotted = group.replace("/", ".")
        settings = {name: None for option in alternatives.classes for name in alternatives.settings(option)}
        keys += [dotted, *(f"{dotted}.{name}" for name in settings)]
    return [*keys, "recipe", "model", "data", "device"]


def _nearest(word: str, candidates: Iterable[str]) -> str:
    """``did you mean …?`` with up to three candidates, or nothing when none is near."""

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, word, candidate).ratio()
        last = SequenceMatcher(None, word.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        # Without a dot the key may be right and only its group left out; with one, both should be near.
        return (whole + last) / 2 if "." in word else max(whole, last)

    ranked = sorted(candidates, key=likeness, reverse=True)
    near = [candidate for candidate in ranked if likeness(candidate) >= max(0.6, likeness(ranked[0]) - 0.1)][:3]
    return _did_you_mean(near)


def _did_you_mean(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def _sentence(error: Exception) -> str:
    """What Hydra or OmegaConf refused, in one sentence."""
    if isinstance(error, OverrideParseException):
        how = f": {_quoted(error.override)}" if "=" in error.override else ""
        return f"{error.override!r} cannot be read: write key=value, and quote a value that has special characters{how}."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if group == "device":
            return not_described(option)
        return f"{group} is {option!r}, and it must be one of {', '.join(error.options)}."
    place = re.match(r"In '(recipe[^']+)'", str(error))
    where = f"in {place[1]}: " if place else ""
    cause = _omegaconf_cause(error)
    if cause is None:
        return where + " ".join(str(error)[place.end() if place else 0 :].split()).strip(": ")
    key = cause.full_key or str(cause.key or "")
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return where + _unknown_key(key)
    message = (cause.msg or str(cause)).splitlines()[0]
    if "is not a ListConfig" in message:
        return f"{where}{key} must be a list: write {key}=[a,b]."
    conversion = re.fullmatch(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", message)
    if conversion and conversion[2] in _KINDS:
        return f"{where}{key} is {conversion[1]!r}, and it must be {_KINDS[conversion[2]]}."
    if message.endswith("is not Optional"):
        return f"{where}{key} is null, and it needs a value."
    return f"{where}{key}{': ' if key else ''}{message.rstrip('.')}."


def _quoted(override: str) -> str:
    """An override as a shell takes it with its value quoted for Hydra."""
    key, _, value = override.partition("=")
    return f"""'{key}="{value}"'"""


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error


def _unknown_key(key: str) -> str:
    group, _, name = key.rpartition(".")
    alternatives = ALTERNATIVES.get(group.replace(".", "/"))
    if alternatives is not None:
        owners = [f"{group}={option}" for option in alternatives.classes if name in alternatives.settings(option)]
        if owners:
            return f"{key} is a setting of {' and '.join(owners)}, which is not chosen here: choose it as well."
    siblings = [known.rpartition(".")[2] for known in _known_keys() if group and known.rpartition(".")[0] == group]
    listed = f"{group} has {', '.join(siblings)}." if siblings else "python -m memtrain --help lists the keys."
    return f"there is no key {key!r}: {_nearest(key, _known_keys()) or listed}"
