"""Which class of a configuration is built, and what a model of a class learns.

transformers sorts its classes by what they learn, in the mappings behind its Auto classes. A task names such a mapping, which has
a class for each type of model; and the mapping that a class is in says its task. A folder may bring classes of its own, which are
read by the same names, and only where its code is trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn

from memtrain.data.task import Task

AUTO_CLASSES: Final = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
}
"""The Auto class of each task, in the order in which a class is looked for: BART's is in two, and learns by the first."""

# What the constants of transformers call the same mappings; a model that is shown images too learns text as any other.
_MAPPINGS: Final = {
    Task.CAUSAL_LM: ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"),
    Task.SEQ2SEQ_LM: ("SEQ_TO_SEQ_CAUSAL_LM",),
    Task.MASKED_LM: ("MASKED_LM",),
    Task.SEQUENCE_CLASSIFICATION: ("SEQUENCE_CLASSIFICATION",),
    Task.TOKEN_CLASSIFICATION: ("TOKEN_CLASSIFICATION",),
    Task.IMAGE_CLASSIFICATION: ("IMAGE_CLASSIFICATION",),
}


class Source(Protocol):
    """What is asked of a source of a model; :mod:`memtrain.models.build` has them."""

    @property
    def task(self) -> Task | None:
        """The task that the user named."""

    @property
    def model_class(self) -> type:
        """The class of what it builds."""

    @property
    def config(self) -> Any:
        """The transformers configuration, None where there is none."""


def task_of(source: Source) -> Task:
    """What a model learns: what the user said, else what its class is for in transformers, else ``other``."""
    return source.task or task_of_class(source.model_class, source.config)


def task_of_class(made: type, config: Any = None) -> Task:
    """What a class of transformers, or one that is derived from it, learns; ``other`` for any other.

    Args:
        config: that of the model, which says whether it is an encoder and a decoder, and what the classes of a folder are for.
    """
    # Where transformers was not loaded, no class can be of it.
    if "transformers" not in sys.modules:
        return Task.OTHER
    own = {_class_in(named): auto for auto, named in own_code(config).items()}
    for task, auto in AUTO_CLASSES.items():
        if own.get(made.__name__) == auto:
            return task
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    for base in made.__mro__:
        for task in AUTO_CLASSES:
            if base.__name__ in _names(task) and not (task is Task.CAUSAL_LM and is_encoder_decoder):
                return task
    return Task.OTHER


def unwrapped(model: nn.Module) -> nn.Module:
    """The model below what peft has put around it, where it has."""
    # What is around it passes the question on, so that it is asked of the class.
    base: nn.Module = model.get_base_model() if hasattr(type(model), "get_base_model") else model  # type: ignore[operator]
    return base


def parse_task(task: Task | str | None) -> Task | None:
    """The task of this name.

    Raises:
        ValueError: there is none.

    >>> parse_task("token_classification")
    <Task.TOKEN_CLASSIFICATION: 'token_classification'>
    """
    if task is None or task in set(Task):
        return None if task is None else Task(task)
    raise ValueError(f"task is {task!r}, and it must be one of {', '.join(Task)}.")


def model_class(config: Any, task: Task | None = None, code: str | None = None) -> Any:
    """The model class of a configuration.

    That is the class of the task, or without one the first of the configuration's ``architectures``, else the language model of
    its type. Of classes for one task the one in ``architectures`` comes first.

    Args:
        code: the folder or hub id whose own classes are trusted, None for no trust.

    Raises:
        ValueError: there is no such class, or it is the folder's own and not trusted.
    """
    import transformers

    task = None if task is Task.OTHER else task
    named = (getattr(config, "architectures", None) or [None])[0]
    if code is not None and own_code(config) and (own := _own_class(config, task, named, code)) is not None:
        return own
    found = None if named is None else getattr(transformers, named, None)
    if task is not None and (found is None or task_of_class(found, config) is not task):
        return _class_for(config, task)
    if found is not None:
        return found
    if named is not None:
        if any(_class_in(one) == named for one in own_code(config).values()):
            raise ValueError(refusal(str(config.name_or_path), config))
        raise ValueError(
            f"architecture {named!r} is not in transformers {transformers.__version__}: give the model as an nn.Module."
        )
    # Encoders such as BERT have a causal class as well, which trains something else unless is_decoder is set.
    if getattr(config, "is_encoder_decoder", False):
        tasks = [Task.SEQ2SEQ_LM]
    elif getattr(config, "is_decoder", False):
        tasks = [Task.CAUSAL_LM]
    else:
        tasks = [Task.MASKED_LM, Task.CAUSAL_LM]
    for one in tasks:
        if (first := _mapped(config, one)) is not None:
            return first
    raise ValueError(
        f"model_type {config.model_type!r} has no language model in transformers: name the class in 'architectures', or a task."
    )


def own_code(config: Any) -> Mapping[str, str]:
    """The classes that a model's files bring, ``file.Class`` by the name of the Auto class; empty where there are none.

    Args:
        config: a configuration, or what its file holds.
    """
    found = config.get("auto_map") if isinstance(config, Mapping) else getattr(config, "auto_map", None)
    return {auto: named for auto, named in (found or {}).items() if isinstance(named, str)}


def refusal(path: str, config: Any) -> str:
    """The sentence for a model whose own code would have to be run.

    Args:
        config: as :func:`own_code` takes it.
    """
    brought = own_code(config)
    models = [_file_of(named) for auto, named in brought.items() if auto.startswith("AutoModel")]
    files = models or [_file_of(named) for named in brought.values()] or [_code_beside(path) or "none"]
    return (
        f"model {path!r} brings its own code ({files[0]}), which is not run unasked: read it, and set trust_remote_code to true if "
        f"you trust it."
    )


def needs_own_code(path: str, described: Mapping[str, Any]) -> bool:
    """Whether a model of a type that transformers does not know brings code of its own.

    Args:
        path: a folder or a hub id.
        described: what its configuration file holds.
    """
    from transformers import CONFIG_MAPPING

    if described.get("model_type") in CONFIG_MAPPING:
        return False
    return bool(own_code(described)) or _code_beside(path) is not None


# ---------------------------------------------------------------------------------------------- classes


def _names(task: Task) -> set[str]:
    from transformers.models.auto import modeling_auto

    mappings = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in _MAPPINGS[task]]
    return {name for mapping in mappings for entry in mapping.values() for name in _each(entry)}


def _each(entry: Any) -> Iterator[Any]:
    yield from entry if isinstance(entry, tuple) else (entry,)


def _mapped(config: Any, task: Task) -> Any:
    """The class of transformers for a task, None where the type of model has none."""
    import transformers

    mapping = getattr(transformers, AUTO_CLASSES[task])._model_mapping
    return next(_each(mapping[type(config)])) if type(config) in mapping else None


def _class_for(config: Any, task: Task) -> Any:
    found = _mapped(config, task)
    if found is None:
        others = [one for one in AUTO_CLASSES if _mapped(config, one) is not None]
        raise ValueError(
            f"task is {task}, and transformers has no class of model_type {config.model_type!r} for it: choose one of "
            f"{', '.join(others) or 'none'}, or give the model as an nn.Module."
        )
    looks_ahead = getattr(config, "is_decoder", None) is False and _mapped(config, Task.MASKED_LM) is not None
    if task is Task.CAUSAL_LM and looks_ahead and not getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"task is {task}, and a {config.model_type} model sees later tokens unless is_decoder is true: set is_decoder to true, "
            f"or task to {Task.MASKED_LM}."
        )
    return found


# ---------------------------------------------------------------------------------------------- code of the model's own


def _own_class(config: Any, task: Task | None, named: str | None, code: str) -> Any:
    """The class that a folder brings for a task, or for the first of its architectures; None where it brings none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    brought = {auto: one for auto, one in own_code(config).items() if auto.startswith("AutoModel")}
    if task is not None:
        autos = [AUTO_CLASSES[task]]
    else:
        autos = [auto for auto, one in brought.items() if _class_in(one) == named] or [*AUTO_CLASSES.values(), "AutoModel"]
    auto = next((auto for auto in autos if auto in brought), None)
    if auto is None:
        return None
    made: Any = get_class_from_dynamic_module(brought[auto], code)
    # It is saved with its code, as transformers' own loading of such classes arranges it.
    made.register_for_auto_class(auto)
    return made


def _class_in(named: str) -> str:
    return named.rpartition(".")[2]


def _file_of(named: str) -> str:
    """``repository--file.Class`` or ``file.Class`` as a file."""
    repository, _, rest = named.rpartition("--")
    file = f"{rest.partition('.')[0]}.py"
    return f"{file} of {repository}" if repository else file


def _code_beside(path: str) -> str | None:
    return next((file.name for file in sorted(Path(path).glob("modeling_*.py"))), None)
