"""What a model was made for, told by its class."""

from __future__ import annotations

from memtrain.data.task import Task
from memtrain.models.build import FromModule, ModelSource, model_class


def task_of(source: ModelSource) -> Task:
    """The task of the model that a source gives, by the lists of transformers; ``other`` for classes that are in none."""
    from transformers.models.auto import modeling_auto as auto

    kind = type(source.module) if isinstance(source, FromModule) else model_class(source.config)
    named = {base.__name__ for base in kind.__mro__}
    # A model that reads one text and writes another is in the list of causal ones as well.
    for task, mapping in (
        (Task.SEQ2SEQ_LM, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        (Task.CAUSAL_LM, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (Task.MASKED_LM, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        (Task.SEQUENCE_CLASSIFICATION, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        (Task.TOKEN_CLASSIFICATION, auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        (Task.IMAGE_CLASSIFICATION, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ):
        if not named.isdisjoint(mapping.values()):
            return task
    return Task.OTHER
