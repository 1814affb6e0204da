"""Models from the Hugging Face hub: a config first, so that nothing large is fetched in vain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from orchestrator.bootstrap import answers
from orchestrator.embedded.folder import checked_config, is_complete
from orchestrator.errors import ConfigError

PROBE_LIMIT_S = 3.0
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
NO_SUBFOLDERS = ("*/*",)
# The first base of the hub's own error is the root of whichever HTTP library it uses.
_HTTP_FAILURES = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
FAILURES: tuple[type[Exception], ...] = (OSError, ValueError, EntryNotFoundError, *_HTTP_FAILURES)
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


@dataclass(frozen=True, slots=True)
class Hub:
    """One hub, as the environment and the settings name it."""

    endpoint: str
    cache: Path
    offline: bool
    token: str | None
    progress: Callable[[str], None]
    sized: Callable[[Path, int], None] | None = None
    """Hears before a download which folder grows, and by how many bytes."""

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str],
        token_file: Path | None,
        progress: Callable[[str], None],
        sized: Callable[[Path, int], None] | None = None,
    ) -> Hub:
        """HF_ENDPOINT, HF_HUB_CACHE, HF_HOME and HF_HUB_OFFLINE, as the hub's own tools read them."""
        home = env.get("HF_HOME")
        cache = env.get("HF_HUB_CACHE") or (f"{home}/hub" if home else constants.HF_HUB_CACHE)
        return cls(
            endpoint=(env.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
            cache=Path(cache).expanduser(),
            offline=env.get("HF_HUB_OFFLINE", "").upper() in _TRUE,
            token=_read_token(token_file) if token_file else None,
            progress=progress,
            sized=sized,
        )

    def snapshot(
        self, model: str, revision: str | None, *, cached_first: bool, required: bool
    ) -> Path | None:
        """The folder of `model` in the hub's cache, fetched when the hub answers.

        `cached_first` asks nobody where a complete copy lies in the cache.  None instead of
        ConfigError unless `required`.
        """
        cached = self._cached(model, revision)
        if cached and (cached_first or self.offline):
            return cached
        if self.offline:
            why = "HF_HUB_OFFLINE is set"
        elif answers(f"{self.endpoint}/api/models/{model}", PROBE_LIMIT_S):
            try:
                return self._fetch(model, revision)
            except ConfigError as error:
                if required:
                    raise
                self.progress(str(error))
                return None
        else:
            why = f"the hub ({self.endpoint}) did not answer within {PROBE_LIMIT_S:.0f} s"
        if cached:
            self.progress(f"{_capital(why)}: using the copy of {model} in the cache.")
        elif required:
            raise ConfigError(
                f"The model {model} is not in the cache and {why}: name a local folder, or try again later."
            )
        else:
            self.progress(f"{_capital(why)}.")
        return cached

    def _cached(self, model: str, revision: str | None) -> Path | None:
        try:
            folder = Path(self._download(model, revision, PATTERNS, local_files_only=True))
        except FAILURES:
            return None
        return folder if is_complete(folder, model) else None

    def _fetch(self, model: str, revision: str | None) -> Path:
        try:
            checked_config(Path(self._download(model, revision, ("config.json",))), model)
            plan = self._download(model, revision, PATTERNS, dry_run=True)
            if not any(file.filename.endswith(".safetensors") for file in plan):
                raise ConfigError(f"The model {model} has no safetensors file; other formats are not loaded.")
            missing_bytes = sum(file.file_size for file in plan if file.will_download)
            if missing_bytes:
                self.progress(f"Downloading {model} from the hub: about {missing_bytes / 1e6:.0f} MB.")
                if self.sized is not None:
                    self.sized(self.cache / f"models--{model.replace('/', '--')}", missing_bytes)
            return Path(self._download(model, revision, PATTERNS))
        except FAILURES as error:
            raise ConfigError(_sentence(model, revision, error)) from error

    def _download(self, model: str, revision: str | None, patterns: tuple[str, ...], **options: bool) -> Any:
        """A folder, or with `dry_run` the list of files."""
        request: dict[str, Any] = {
            "revision": revision,
            "cache_dir": self.cache,
            "endpoint": self.endpoint,
            "token": self.token,
            "allow_patterns": list(patterns),
            "ignore_patterns": list(NO_SUBFOLDERS),
        }
        return snapshot_download(model, **request | options)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The token file {path} cannot be read: {error}.") from None
    if not token:
        raise ConfigError(f"The token file {path} is empty.")
    return token


def _sentence(model: str, revision: str | None, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"The model {model} is gated: accept its licence on the hub and name a token in model.token_file."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"The hub has no revision {revision!r} of {model}."
    if isinstance(error, RepositoryNotFoundError):
        return f"The hub has no model {model}, or not for this token (model.token_file)."
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"The model {model} could not be fetched from the hub: {lines[0].rstrip('.')}."
