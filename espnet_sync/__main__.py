"""Run an ESPnet2 training command with its task synced; hand anything else to Python.

`espnet_sync [OPTIONS] -m espnet2.bin.<x>_train ARGS` is what `python -m espnet2.bin.<x>_train
ARGS` is, except that the ranks end every epoch at the same batch. It stands where recipes have
`python`, so whatever is no training command goes to the same interpreter unchanged, at the cost
of its start and no more: nothing here imports torch before it must.
"""

import importlib
import importlib.util
import os
import re
import shlex
import sys
from functools import partial
from types import ModuleType
from typing import Any

RUNNER_OPTIONS = (
    "epoch_sync",
    "epoch_sync_conf",
    "valid_epoch_sync",
    "valid_epoch_sync_conf",
    "chunk_balance",
)

USAGE = """\
usage: espnet_sync [OPTIONS] -m espnet2.bin.<x>_train ARGS
       espnet_sync ANYTHING THAT python TAKES

Runs an ESPnet2 training command so that all ranks end every epoch at the same batch. Anything
else is handed to Python unchanged.

OPTIONS are defaults for the keys of the same names, which the training command's own config and
command line override:
  --epoch_sync {shortest,longest,none}
  --epoch_sync_conf KEY=VALUE
  --valid_epoch_sync {shortest,longest,none}
  --valid_epoch_sync_conf KEY=VALUE
  --chunk_balance {true,false}
The training command's --help tells more about them.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the entry point of the console script.

    Args:
        argv: The words after the program's name; None takes `sys.argv`'s.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--help"] or argv[:1] == ["-h"]:
        sys.stdout.write(USAGE)
        return
    options, rest = split_runner_options(argv)
    flags, command = split_interpreter_flags(rest)
    module = training_module(command)
    if module is None or not is_guarded(module):
        # NOTE: a recipe puts the same words, options and all, before every command.
        os.execv(sys.executable, [sys.executable, *rest])
    if flags:
        given = [f"--{name}={value}" for name, value in options]
        os.execv(sys.executable, [sys.executable, *flags, "-m", "espnet_sync", *given, *command])
    run_training(module, options, command)


def split_runner_options(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the runner's own leading options from the words for Python.

    Examples:
        >>> split_runner_options(["--epoch_sync", "none", "-u", "-m", "x_train", "--epoch_sync"])
        ([('epoch_sync', 'none')], ['-u', '-m', 'x_train', '--epoch_sync'])
        >>> split_runner_options(["--epoch_sync_conf=timeout=60", "script.py"])
        ([('epoch_sync_conf', 'timeout=60')], ['script.py'])
    """
    options: list[tuple[str, str]] = []
    rest = list(argv)
    while rest and rest[0].startswith("--"):
        name, has_value, value = rest[0][2:].partition("=")
        if name not in RUNNER_OPTIONS:
            break
        rest.pop(0)
        if not has_value:
            if not rest:
                fail(f"--{name} needs a value")
            value = rest.pop(0)
        options.append((name, value))
    return options, rest


def split_interpreter_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Split Python's own flags from what it is to run.

    Examples:
        >>> split_interpreter_flags(["-u", "-W", "error", "-m", "x_train", "-v"])
        (['-u', '-W', 'error'], ['-m', 'x_train', '-v'])
    """
    number = 0
    while number < len(words):
        word = words[number]
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            number += 2
        elif re.fullmatch(r"-[bBdEhiIOPqsSuvVx?]+|-[WX].+|--.+", word):
            number += 1
        else:
            break
    return words[:number], words[number:]


def training_module(words: list[str]) -> str | None:
    """Return the module of a training command, or None for anything else.

    Examples:
        >>> training_module(["-m", "espnet2.bin.asr_train", "--ngpu", "0"])
        'espnet2.bin.asr_train'
        >>> training_module(["-m", "espnet2.bin.asr_inference"])
        >>> training_module(["local/my_train.py"])
    """
    if len(words) < 2 or words[0] != "-m" or "_train" not in words[1].rpartition(".")[2]:
        return None
    return words[1]


def is_guarded(name: str) -> bool:
    """Return whether importing a module runs nothing, as far as its text tells.

    A module without `if __name__ == "__main__":` would run when it is imported, unsynced, and
    once more when it is handed to Python.
    """
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    with open(spec.origin, encoding="utf-8", errors="replace") as file:
        text = file.read()
    return bool(re.search(r"^if\b.*(__name__.*__main__|__main__.*__name__)", text, re.MULTILINE))


def run_training(name: str, options: list[tuple[str, str]], words: list[str]) -> None:
    """Run a training module's `main` with the tasks in its namespace synced.

    Args:
        name: The module, e.g. `espnet2.bin.asr_train`.
        options: The runner's options, with their values as text.
        words: The command line from `-m` on, for where the module turns out not to be one.
    """
    line = [sys.argv[0], *(f"--{option}={value}" for option, value in options), *words]
    module = importlib.import_module(name)
    if not sync_tasks(module, read_options(options)):
        os.execv(sys.executable, [sys.executable, *words])
    if not hasattr(module, "main"):
        fail(
            f"{name} holds an ESPnet2 task and no function main(): move what follows its "
            "`if __name__ == '__main__':` into one"
        )
    keep_command_line(module, line)
    sys.argv = [str(module.__file__), *words[2:]]
    module.main()
    for task in getattr(module, "task_choices", {}).values():
        task.plot_logged_epochs()


def keep_command_line(module: ModuleType, line: list[str]) -> None:
    """Have ESPnet2 print, and Lightning start its other ranks by, the runner's command line.

    Args:
        module: The module of a training command.
        line: What `sys.argv` is to be for it.
    """
    from espnet2.tasks import abs_task

    printed = [sys.executable, "-m", "espnet_sync", *line[1:]]
    abs_task.get_commandline_args = partial(shlex.join, printed)
    if hasattr(module, "task_choices") and hasattr(module, "get_parser"):
        get_parser = module.get_parser

        def get_task_parser(*args: Any) -> Any:
            parser = get_parser(*args)
            # Nothing but Lightning's launcher reads it from here on: the task's words are
            # handed to this parser.
            sys.argv = line
            return parser

        module.get_parser = get_task_parser  # type: ignore[attr-defined]


def read_options(options: list[tuple[str, str]]) -> dict[str, Any]:
    """Parse the runner's options as the training command's parser would."""
    from espnet_sync.task import parse_keys

    return parse_keys([f"--{name}={value}" for name, value in options])


def sync_tasks(module: ModuleType, defaults: dict[str, Any]) -> bool:
    """Replace the ESPnet2 tasks in a module's namespace by synced ones.

    Args:
        module: The module of a training command.
        defaults: Defaults for the keys.

    Returns:
        bool: Whether there was a task.
    """
    from espnet2.tasks.abs_task import AbsTask

    from espnet_sync.task import synced, synced_for_lightning

    # ESPnet2's Lightning command chooses its task from a dictionary, and counts epochs from 0.
    choices = getattr(module, "task_choices", {})
    for name, task in choices.items():
        choices[name] = synced_for_lightning(task, **defaults)
    tasks = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, AbsTask)
    }
    for name, task in tasks.items():
        setattr(module, name, synced(task, **defaults))
    return bool(tasks or choices)


def fail(message: str) -> None:
    """Say what is wrong with the command line, and leave with exit code 2."""
    sys.stderr.write(f"espnet_sync: error: {message}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
