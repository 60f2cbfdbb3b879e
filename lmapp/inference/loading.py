"""From a file to a model that is ready to use."""

from __future__ import annotations

from pathlib import Path

from lmapp import checkpoint
from lmapp.config import build
from lmapp.errors import UsageError
from lmapp.inference.infill import Restorer
from lmapp.inference.language_model import LanguageModel
from lmapp.models import make_model
from lmapp.vocabulary import Vocabulary


def load(path: str | Path, *, runs_dir: str | Path = "runs", device: str = "cpu") -> LanguageModel | Restorer:
    """A checkpoint, ready to use: a file, a run's directory or a run's name; a `Restorer` of an infill model.

    Nothing else is needed, neither corpus nor cache, and opening a stranger's file runs nothing.

    Raises:
        UsageError: there is no such checkpoint.
        CheckpointError: it is damaged or not lmapp's, or has a cell from outside that is not imported or has changed.
    """
    file = checkpoint.resolve(str(path), runs_dir)
    content = checkpoint.read(file)
    saved = content["lmapp"]
    try:
        config = build(saved["config"])
        vocabulary = Vocabulary.from_json(saved["vocabulary"])
        model = make_model(len(vocabulary), config.model)
        model.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
    except UsageError as error:  # also of a cell from outside, which may have changed since
        raise checkpoint.CheckpointError(f"{file} cannot be opened: {str(error).splitlines()[0]}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise checkpoint.CheckpointError(f"{file} is no complete checkpoint of lmapp: {reason.rstrip('.')}.") from None
    kind = Restorer if config.model.kind == "infill" else LanguageModel
    return kind(model.to(device).eval(), vocabulary, config, saved, file)
