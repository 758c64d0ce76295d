"""Tell a model's folder from a hub id, without MLX: a wrong path is refused before anything is loaded."""

from pathlib import Path

from scorepool.engine.errors import LoadError

WEIGHTS = "model*.safetensors"


def find_local_folder(model: str) -> Path | None:
    """Return the model's folder, or None if it is a hub id. Raises LoadError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        for needed in ("config.json", WEIGHTS):
            if not any(folder.glob(needed)):
                raise LoadError(f"{folder} has no {needed}; a model folder in Hugging Face form has one")
        return folder
    if folder.is_absolute() or model.startswith(("~", ".")) or model.count("/") != 1:
        raise LoadError(f"there is no folder {model!r}; give a model folder, or a hub id such as owner/name")
    return None
