"""Repositories on the hub: which files one has, small ones fetched, and the hub's errors as ours."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiermoe.errors import ModelError
from tiermoe.formats.safetensors import INDEX, SINGLE, indexed
from tiermoe.model.hf.local_models import gguf_models, named

_PLANNED = ("config.json", "generation_config.json", INDEX)
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of config, tokenizer and chat template. Code, pictures and weights in other formats stay where they are."""
_OTHERS = {".gguf": "a GGUF file", ".bin": "PyTorch's own format", ".pth": "PyTorch's own format"}


@dataclass(frozen=True, slots=True)
class Repository:
    """One commit of a repository. sizes: file → bytes."""

    name: str
    commit: str
    sizes: Mapping[str, int]

    @property
    def planned(self) -> list[str]:
        """The files that a plan reads."""
        return [file for file in _PLANNED if file in self.sizes]

    @property
    def beside(self) -> list[str]:
        """The small files that go with the weights."""
        return [file for file in self.sizes if "/" not in file and file.endswith(_BESIDE)]

    @property
    def has_safetensors(self) -> bool:
        """Whether its weights may be safetensors."""
        return any("/" not in file and file.endswith((".safetensors", INDEX)) for file in self.sizes)

    def gguf_models(self) -> dict[str, list[str]]:
        """The models in GGUF files, as `gguf_models`, the largest first."""
        models = gguf_models(self.sizes).items()
        return dict(sorted(models, key=lambda each: -self.nbytes(each[1])))

    def gguf_files(self, file: str) -> list[str]:
        """The files of the model that a user means by `file`. ModelError as `gguf_models.named`."""
        models = self.gguf_models()
        return models[named(models, file, self.name)]

    def weights(self, folder: Path) -> list[str]:
        """The files of the weights, none of which is there twice in another format. folder: holds the small files.
        ModelError where there are no safetensors, or the index names a file that the repository lacks."""
        if INDEX in self.sizes:
            files = indexed(folder / INDEX)
        elif SINGLE in self.sizes:
            files = [SINGLE]
        else:
            files = sorted(file for file in self.sizes if "/" not in file and file.endswith(".safetensors"))
        if not files:
            raise self.without_safetensors()
        missing = [file for file in files if file not in self.sizes]
        if missing:
            raise ModelError(
                f"'{self.name}' lacks {len(missing)} of the {len(files)} shards that its index names, the first is "
                f"{missing[0]}; choose another repository"
            )
        return files

    def nbytes(self, files: Iterable[str]) -> int:
        """Bytes of some files together."""
        return sum(self.sizes[file] for file in files)

    def without_safetensors(self) -> ModelError:
        """The error where a repository has no safetensors."""
        return ModelError(f"'{self.name}' holds no safetensors weights{self._instead()}; choose another repository")

    def _instead(self) -> str:
        found = {kind for file in self.sizes for ending, kind in _OTHERS.items() if file.endswith(ending)}
        named = f"name one of them as {self.name}:FILE, or let 'tiermoe pull {self.name}' choose one"
        pulled = f"; {named}" if self.gguf_models() else ""
        return f" (it has {' and '.join(sorted(found))}{pulled})" if found else ""


def read_repository(name: str) -> Repository:
    """The repository as the hub describes it. ModelError as `hub_errors`."""
    from huggingface_hub import HfApi

    with hub_errors(name):
        info = HfApi().model_info(name, files_metadata=True)
    return Repository(name, str(info.sha), {file.rfilename: int(file.size or 0) for file in info.siblings or []})


def fetch(name: str, files: list[str]) -> Path:
    """The folder in the hub's cache that holds files of a repository, fetched where they are not there. ModelError as
    `hub_errors`."""
    from huggingface_hub import snapshot_download

    with hub_errors(name), _quiet():
        return Path(snapshot_download(name, allow_patterns=[glob.escape(file) for file in files]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, for small files."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turns what a call to the hub raises into a ModelError that says what to do: no such repository, a gated one, no
    connection, offline mode."""
    import httpx2
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"'{name}' is gated: accept its terms at {constants.ENDPOINT}/{name}, log in with 'hf auth login', and run "
            f"this again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model '{name}' on the hub, or it is private; check the name, or log in with 'hf auth login'"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        why, remedy = f"{constants.ENDPOINT} does not answer ({first_line(error)})", "check the connection"
        if constants.HF_HUB_OFFLINE:
            why, remedy = "HF_HUB_OFFLINE is set", "unset it"
        raise ModelError(
            f"'{name}' cannot be downloaded: {why}. There is neither a folder of this name nor a whole copy in the hub "
            f"cache, {constants.HF_HUB_CACHE}; {remedy}, or name a model directory"
        ) from error
    except (errors.HfHubHTTPError, errors.SafetensorsParsingError, OSError) as error:
        raise ModelError(f"'{name}' cannot be read from the hub ({first_line(error)}); try again later") from error


def first_line(error: Exception) -> str:
    """The first line of an exception's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
