"""The settings that an architecture of mlx-lm reads, whether transformers knows them or not."""

import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType

from mlx_lm.models.base import BaseModelArgs

from scorepool.engine.model.checkpoint import import_architecture
from survey.mutations import Config

# What the survey changes in another way, or what is no setting.
_EXCLUDED = {"model_type", "quantization", "rope_parameters", "rope_scaling", "rope_theta", "text_config"}


def own_settings(config: Config) -> Config:
    """Return the settings of the architecture that have a default, by name.

    An architecture that takes its text model from another module has the settings of that module.
    """
    model_class, _ = import_architecture(config)
    module = sys.modules[model_class.__module__]
    used = [found for found in vars(module).values() if _is_architecture(found)]
    settings: Config = {}
    for source in (*used, module):
        for kind in vars(source).values():
            if inspect.isclass(kind) and issubclass(kind, BaseModelArgs) and is_dataclass(kind):
                settings |= {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    return {name: default for name, default in settings.items() if name not in _EXCLUDED}


def _is_architecture(found: object) -> bool:
    return isinstance(found, ModuleType) and found.__name__.startswith("mlx_lm.models.")
