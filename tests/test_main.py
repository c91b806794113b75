"""The runner: what it syncs, what it hands to Python unchanged, and which value of a key wins."""

import importlib.metadata
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import espnet2.bin.lm_train  # noqa: F401  # seconds, which each fork below is spared
import pytest
import yaml

from espnet_sync import __main__ as runner
from espnet_sync.__main__ import main, split_runner_options, training_module


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, and what it wrote."""

    code: int | None
    out: str
    err: str


def run(
    words: list[str], folder: Path, stdin: str = "", program: str = "espnet_sync", **variables: str
) -> Ended:
    """Run the runner, or Python itself, in a process of its own."""
    command = [
        sys.executable,
        *(["-m", "espnet_sync"] if program == "espnet_sync" else []),
        *words,
    ]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=folder, env=environment
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run_in_fork(words: list[str], folder: Path) -> Ended:
    """Run the runner in a fork of this process, which has imported ESPnet2's tasks already."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run_here, args=(words, folder))
    process.start()
    process.join()
    return Ended(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


def _run_here(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # As `python -m espnet_sync` has it: the folder of the module that runs.
    sys.path.insert(0, str(folder))
    main(words)


# --- Handed to Python -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["-c", "raise SystemExit(7)"], ["leave.py"], ["-m", "leave"]])
def test_the_exit_code_is_the_commands(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("raise SystemExit(7)")
    assert run(words, tmp_path) == Ended(7, "", "")


def test_a_signal_ends_the_command_as_it_ends_python(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run(["-c", code], tmp_path).code == -15


def test_words_reach_the_command_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.write_text("import sys; print(sys.argv)")
    words = [str(script), "two words", "", "--epoch_sync", "none", "-m", "x_train", "$HOME", "é"]
    assert run(words, tmp_path).out == f"{words}\n"
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:])")
    assert run(["-m", "show", *words], tmp_path).out == f"{words}\n"


def test_standard_input_reaches_the_command(tmp_path: Path) -> None:
    assert run(["-c", "print(input())"], tmp_path, stdin="a line\n").out == "a line\n"
    assert run(["-"], tmp_path, stdin="print('a script')").out == "a script\n"
    assert run([], tmp_path, stdin="print('no words')").out == "no words\n"
    assert run(["-m", "json.tool", "--compact"], tmp_path, stdin='{"a": 1}').out == '{"a":1}\n'


def test_interpreter_flags_are_kept(tmp_path: Path) -> None:
    code = "import sys; print(sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions)"
    words = ["-O", "-X", "utf8", "-W", "error", "-c", code]
    assert run(words, tmp_path).out == "1 1 ['error']\n"


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "no_such_module"],
        ["no_such_script.py"],
        ["--no_such_flag"],
        ["-c", "1/0"],
        ["-V"],
    ],
    ids=" ".join,
)
def test_whatever_python_says_is_said(words: list[str], tmp_path: Path) -> None:
    assert run(words, tmp_path) == run(words, tmp_path, program="python")


def test_a_training_module_that_is_not_there_is_pythons_to_report(tmp_path: Path) -> None:
    ended = run(["-m", "no_such_train"], tmp_path)
    assert ended.code == run(["-m", "no_such_train"], tmp_path, program="python").code == 1
    assert "No module named" in ended.err
    assert "no_such_train" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ["--epoch_sync", "none", "-c", "print('ran')"],
        ["--epoch_sync_conf=timeout=60", "--valid_epoch_sync", "none", "say.py"],
        ["--epoch_sync", "longest", "-m", "say"],
    ],
    ids=" ".join,
)
def test_options_before_what_is_no_training_are_for_the_trainings_of_the_recipe(
    words: list[str], tmp_path: Path
) -> None:
    # A recipe runs `--python "espnet_sync --epoch_sync longest"` for all that it does.
    (tmp_path / "say.py").write_text("print('ran')")
    assert run(words, tmp_path) == Ended(0, "ran\n", "")


def test_the_hand_over_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import sys; print('torch' in sys.modules)")
    for words in (["show.py"], ["-m", "show"], ["-c", "import show"]):
        ended = run(words, tmp_path, PYTHONPROFILEIMPORTTIME="1")
        assert (ended.code, ended.out) == (0, "False\n")
        # Of both processes: that of the runner, and that of the command in its place.
        imported = {line.rpartition("|")[2].strip() for line in ended.err.splitlines()}
        assert "espnet_sync" in imported
        assert not {"torch", "numpy", "espnet2", "argparse"} & imported


def test_importing_the_package_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, espnet_sync; dir(espnet_sync); print('torch' in sys.modules)"
    assert run(["-c", code], tmp_path, program="python").out == "False\n"


# --- Its own words ----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_tells_what_it_is_for_and_lists_the_options(word: str, tmp_path: Path) -> None:
    ended = run([word], tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert ended.code == 0
    for part in ("usage: espnet_sync", "--epoch_sync ", "--epoch_sync_conf", "--valid_epoch_sync"):
        assert part in ended.out
    assert "| torch" not in ended.err


def test_an_option_without_a_value_is_refused(tmp_path: Path) -> None:
    ended = run(["--epoch_sync"], tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert "--epoch_sync needs a value" in ended.err


def test_the_console_script_is_the_same() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="espnet_sync")
    assert entry.load() is main


def test_main_takes_its_words_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []

    def execute(*given: Any) -> None:
        handed.append(given)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(sys, "argv", ["espnet_sync", "-c", "pass"])
    with pytest.raises(SystemExit):
        main()
    assert handed == [(sys.executable, [sys.executable, "-c", "pass"])]


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ([], [], []),
        (["-m", "x_train", "--epoch_sync", "none"], [], None),
        (["script.py", "--epoch_sync=none"], [], None),
        (["--epoch_sync", "none", "-m", "x"], [("epoch_sync", "none")], ["-m", "x"]),
        (["--epoch_sync=none", "-m", "x"], [("epoch_sync", "none")], ["-m", "x"]),
        (
            ["--epoch_sync_conf", "timeout=60", "--epoch_sync_conf=warn_after=5", "-c", "pass"],
            [("epoch_sync_conf", "timeout=60"), ("epoch_sync_conf", "warn_after=5")],
            ["-c", "pass"],
        ),
        (
            ["--valid_epoch_sync", "none", "--valid_epoch_sync_conf", "{timeout: 60}"],
            [("valid_epoch_sync", "none"), ("valid_epoch_sync_conf", "{timeout: 60}")],
            [],
        ),
        (["--check-hash-based-pycs", "always", "x.py"], [], None),
    ],
    ids=str,
)
def test_only_leading_options_of_its_own_are_taken(
    words: list[str], options: list[tuple[str, str]], rest: list[str] | None
) -> None:
    assert split_runner_options(words) == (options, words if rest is None else rest)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["-m", "espnet2.bin.enh_train", "--ngpu", "0"], "espnet2.bin.enh_train"),
        (["-m", "espnet2.bin.s2t_train_ctc"], "espnet2.bin.s2t_train_ctc"),
        (["-m", "my_train"], "my_train"),
        (["-m", "espnet2.bin.enh_inference"], None),
        (["-m", "my_training.tools"], None),
        (["-m", "my_train.tools"], None),
        (["-m"], None),
        (["-c", "espnet2.bin.enh_train"], None),
        (["espnet2/bin/enh_train.py"], None),
        ([], None),
    ],
    ids=str,
)
def test_a_training_is_known_by_its_modules_last_part(
    words: list[str], module: str | None
) -> None:
    assert training_module(words) == module


# --- Trainings --------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Ended]:
    """Return a function that runs a real training command up to where it would train."""
    (tmp_path / "tokens").write_text("<blank>\n<unk>\na\n<sos/eos>\n")

    def run_training(before: list[str], after: list[str], config: dict[str, Any]) -> Ended:
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
        words = ["--config", "train.yaml", "--token_list", "tokens", "--token_type", "char"]
        words += ["--output_dir", "exp", "--dry_run", "true", "--lm_conf", "unit=2"]
        return run_in_fork([*before, "-m", "espnet2.bin.lm_train", *words, *after], tmp_path)

    return run_training


@pytest.mark.parametrize(
    ("before", "config", "after", "expected"),
    [
        ([], {}, [], {"epoch_sync": "shortest", "valid_epoch_sync": "shortest"}),
        (["--epoch_sync", "longest"], {}, [], {"epoch_sync": "longest"}),
        (["--epoch_sync", "longest"], {"epoch_sync": False}, [], {"epoch_sync": "none"}),
        (
            ["--epoch_sync", "longest"],
            {"epoch_sync": "none"},
            ["--epoch_sync", "true"],
            {"epoch_sync": "shortest"},
        ),
        (["--valid_epoch_sync=none"], {}, [], {"valid_epoch_sync": "none"}),
        (
            ["--epoch_sync_conf", "timeout=60", "--epoch_sync_conf", "warn_after=5"],
            {},
            [],
            {"epoch_sync_conf": {"timeout": 60, "warn_after": 5}},
        ),
        (
            ["--epoch_sync_conf", "timeout=60"],
            {"epoch_sync_conf": {"timeout": 70}},
            [],
            {"epoch_sync_conf": {"timeout": 70}},
        ),
        (
            ["--epoch_sync_conf", "timeout=60"],
            {"epoch_sync_conf": {"timeout": 70}},
            ["--epoch_sync_conf", "timeout=80"],
            {"epoch_sync_conf": {"timeout": 80}},
        ),
    ],
    ids=[
        "defaults",
        "runner",
        "runner, YAML",
        "runner, YAML, command line",
        "validation",
        "conf: runner",
        "conf: runner, YAML",
        "conf: runner, YAML, command line",
    ],
)
def test_the_last_of_runner_yaml_and_command_line_wins(
    before: list[str],
    config: dict[str, Any],
    after: list[str],
    expected: dict[str, Any],
    train: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    ended = train(before, after, config)
    assert ended.code == 0, ended.err
    written = yaml.safe_load((tmp_path / "exp" / "config.yaml").read_text())
    assert {key: written[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("before", "config", "parts"),
    [
        (["--epoch_sync", "middle"], {}, ["epoch_sync", "'middle'", "'shortest', 'longest'"]),
        (["--epoch_sync_conf", "timeout=0"], {}, ["epoch_sync_conf", "timeout=0", "above 0"]),
        (["--epoch_sync_conf", "label=x"], {}, ["epoch_sync_conf", "label='x'", "'timeout'"]),
        ([], {"epoch_sync": "middle"}, ["epoch_sync", "'middle'", "'shortest', 'longest'"]),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_at_start_without_a_traceback(
    before: list[str],
    config: dict[str, Any],
    parts: list[str],
    train: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    ended = train(before, [], config)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    for part in parts:
        assert part in ended.err.splitlines()[-1]
    assert not (tmp_path / "exp").exists()


def test_a_refusal_in_a_process_of_its_own_looks_the_same(tmp_path: Path) -> None:
    words = ["--epoch_sync_conf", "lookahed=2", "--output_dir", "exp", "--token_list", "x"]
    ended = run(["-m", "espnet2.bin.lm_train", *words], tmp_path)
    assert ended.code == 2
    # espnet 202511 says on standard output what it could not import.
    assert re.sub("Failed to import Flash Attention.*\n", "", ended.out) == ""
    assert "Traceback" not in ended.err
    assert "epoch_sync_conf: unknown option lookahed=2" in ended.err.splitlines()[-1]


OWN_TRAINING = """
import sys
from espnet2.tasks.lm import LMTask
from own_parts import helper

class OwnTask(LMTask):
    pass

def main(cmd=None):
    print(sys.argv[0].endswith("own_train.py"), sys.argv[1:])
    for task in (LMTask, OwnTask):
        print(task.__name__, "epoch_sync" in vars(task.get_parser().parse_args([])))
    sys.exit(5)

if __name__ == "__main__":
    main()
"""


def test_a_training_module_of_ones_own_is_synced(tmp_path: Path) -> None:
    (tmp_path / "own_train.py").write_text(OWN_TRAINING)
    (tmp_path / "own_parts.py").write_text("helper = 1")
    ended = run_in_fork(["-m", "own_train", "two words"], tmp_path)
    assert (ended.code, ended.err) == (5, "")
    assert ended.out.splitlines() == ["True ['two words']", "LMTask True", "OwnTask True"]


def test_a_training_module_without_a_task_is_handed_to_python(tmp_path: Path) -> None:
    (tmp_path / "other_train.py").write_text(
        "import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit(6)\n"
    )
    ended = run_in_fork(["-m", "other_train", "two words"], tmp_path)
    assert (ended.code, ended.out, ended.err) == (6, "['two words']\n", "")


def test_the_runners_options_are_the_keys_of_the_task() -> None:
    from espnet_sync.task import KEYS

    assert set(runner.RUNNER_OPTIONS) == set(KEYS)
