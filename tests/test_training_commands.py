"""Every ESPnet2 training command, one's own, and recipes: what the runner syncs and says."""

import contextlib
import importlib
import io
import json
import pickle
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import espnet2.bin.lm_train  # noqa: F401  # seconds, which each fork below is spared
import pytest
import yaml

from espnet_sync import __main__ as runner
from espnet_sync.task import KEYS
from tests.speech import DEADLINE, RUNNER, run
from tests.test_main import run_in_fork

ROOT = Path(__file__).parent.parent

# --- ESPnet2's own ----------------------------------------------------------------------------


def training_modules() -> list[str]:
    """Return the names of all training commands of the installed ESPnet2."""
    import espnet2.bin

    found = [module.name for module in pkgutil.iter_modules(espnet2.bin.__path__)]
    return [f"espnet2.bin.{name}" for name in found if "_train" in name]


def survey() -> None:
    """Import and sync all training commands, and print what their tasks show, as JSON."""
    found = {name: look_at(name) for name in training_modules()}
    print(json.dumps(found))


def look_at(name: str) -> dict[str, Any]:
    """Return why a training command can't be imported, or what its synced tasks show."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    from espnet2.tasks.abs_task import AbsTask

    if not runner.sync_tasks(module, {"valid_epoch_sync": "none"}):
        return {"tasks": {}}
    tasks = dict(getattr(module, "task_choices", {}))
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, AbsTask):
            tasks[value.__name__] = value
    shown = {}
    for task_name, task in tasks.items():
        sys.argv = [name]  # which ESPnet2 parses to print a config
        usage = task.get_parser().format_help()
        shown_config = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()):
            task.print_config(file=shown_config)
        config = yaml.safe_load(shown_config.getvalue())
        shown[task_name] = {
            "help": sorted(key for key in KEYS if f"--{key} " in usage),
            "config": {key: config[key] for key in KEYS if key in config},
            "pickled": pickle.loads(pickle.dumps(task.main_worker)).__self__ is task,
        }
    return {"guarded": runner.is_guarded(name), "tasks": shown}


def test_every_training_command_of_espnet2_is_synced() -> None:
    code = "from tests.test_training_commands import survey; survey()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    refused = {name: seen["reason"] for name, seen in found.items() if "reason" in seen}
    for name, reason in refused.items():
        print(f"{name} can't be imported: {reason}")
    print(f"{len(found) - len(refused)} of {len(found)} training commands are synced")
    kinds = {reason.partition(":")[0] for reason in refused.values()}
    assert kinds <= {"ModuleNotFoundError", "ImportError"}
    assert {"espnet2.bin.asr_train", "espnet2.bin.enh_train", "espnet2.bin.gan_codec_train"} <= (
        found.keys() - refused.keys()
    )
    expected = {
        "help": sorted(KEYS),
        "config": {**KEYS, "valid_epoch_sync": "none"},
        "pickled": True,
    }
    for name in found.keys() - refused.keys():
        assert found[name]["guarded"], name
        assert found[name]["tasks"], name
        for task, seen in found[name]["tasks"].items():
            assert seen == expected, f"{name}: {task}"


# --- One's own --------------------------------------------------------------------------------

OWN_TRAINING = """
import sys
from espnet2.tasks.lm import LMTask
from mypkg.parts import helper

class OwnTask(LMTask):
    pass

def main(cmd=None):
    print(sys.flags.no_site, sys.warnoptions, sys.argv[0].endswith("my_train.py"))
    OwnTask.main(cmd=cmd)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Write a package with a training command of its own, and what an LM needs to start."""
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").touch()
    (tmp_path / "mypkg" / "parts.py").write_text("helper = 1\n")
    (tmp_path / "mypkg" / "my_train.py").write_text(OWN_TRAINING)
    (tmp_path / "tokens").write_text("<blank>\n<unk>\na\n<sos/eos>\n")
    return tmp_path


#: A training of a language model, up to where it would train.
DRY = ["--token_list", "tokens", "--token_type", "char", "--dry_run", "true", "--output_dir"]


def keys_of(output: Path) -> dict[str, Any]:
    """Return the keys in the config of an experiment."""
    config = yaml.safe_load((output / "config.yaml").read_text())
    return {key: value for key, value in config.items() if key in KEYS}


def test_a_command_of_ones_own_package_is_synced_from_the_working_directory(package: Path) -> None:
    ended = run_in_fork(["-m", "mypkg.my_train", *DRY, "exp"], package)
    assert ended.code == 0, ended.err
    assert ended.out == "0 [] True\n"
    assert keys_of(package / "exp") == KEYS


def test_interpreter_flags_keep_syncing_on(package: Path) -> None:
    words = ["--epoch_sync", "longest", "-u", "-W", "ignore", "-m", "mypkg.my_train", *DRY, "exp"]
    ended = run([RUNNER, *words], package)
    assert ended.code == 0, ended.output
    assert "0 ['ignore'] True" in ended.output
    assert keys_of(package / "exp")["epoch_sync"] == "longest"


def test_a_task_pickles_where_the_module_that_runs_defines_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    module: Any = importlib.import_module("mypkg.my_train")
    own = module.OwnTask
    assert runner.sync_tasks(module, {"epoch_sync": "longest"})
    made = module.OwnTask
    assert made is not own
    assert pickle.loads(pickle.dumps(made)) is made
    # As another process finds it, which has not synced the module.
    monkeypatch.setattr(module, "OwnTask", own)
    assert pickle.loads(pickle.dumps(made)) is made
    monkeypatch.delattr(module, "OwnTask")
    with pytest.raises(AttributeError, match="OwnTask"):
        pickle.dumps(made)


def test_a_module_that_runs_when_it_is_imported_is_run_once_by_python(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_train.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    ended = run_in_fork(["-m", "tokenizer_train", "two words"], tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "__main__ ['two words']\n", "")


def test_a_task_without_a_main_is_refused_and_not_run_unsynced(tmp_path: Path) -> None:
    (tmp_path / "own_train.py").write_text(
        "from espnet2.tasks.lm import LMTask\nif __name__ == '__main__':\n    LMTask.main()\n"
    )
    ended = run_in_fork(["-m", "own_train"], tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert "own_train holds an ESPnet2 task and no function main()" in ended.err


# --- Refused at start, and which value wins ---------------------------------------------------

REFUSED = [
    (["--epoch_sink", "none"], {}, ["unrecognized arguments", "--epoch_sink"]),
    ([], {"epoch_sink": "none"}, ["epoch_sink"]),
    (["--epoch_sync", "middle"], {}, ["epoch_sync", "'middle'", "'shortest', 'longest'"]),
    ([], {"valid_epoch_sync": "middle"}, ["valid_epoch_sync", "'middle'", "'longest'"]),
    (["--epoch_sync_conf", "lookahed=2"], {}, ["epoch_sync_conf", "did you mean 'lookahead'"]),
    ([], {"epoch_sync_conf": {"lookahed": 2}}, ["epoch_sync_conf", "did you mean 'lookahead'"]),
    (["--valid_epoch_sync_conf", "lookahead=-1"], {}, ["valid_epoch_sync_conf", "lookahead=-1"]),
    ([], {"valid_epoch_sync_conf": {"timeout": 0}}, ["valid_epoch_sync_conf", "timeout=0"]),
    ([], {"epoch_sync": "longest", "epoch_sync_conf": {"backend": "default"}}, ["'longest'"]),
]


@pytest.mark.parametrize(("words", "config", "parts"), REFUSED, ids=str)
def test_what_is_wrong_is_refused_before_data_is_read(
    words: list[str], config: dict[str, Any], parts: list[str], package: Path
) -> None:
    (package / "train.yaml").write_text(yaml.safe_dump(config))
    words = ["--config", "train.yaml", *DRY, "exp", *words]
    words += ["--train_data_path_and_name_and_type", "no_such_file,text,text"]
    ended = run_in_fork(["-m", "espnet2.bin.lm_train", *words], package)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    for part in parts:
        assert part in ended.err.splitlines()[-1]
    assert not (package / "exp").exists()


@pytest.mark.parametrize(
    ("before", "config", "after", "expected"),
    [
        (
            ["--epoch_sync", "longest", "--valid_epoch_sync", "none"],
            {"valid_epoch_sync": True},
            ["--epoch_sync", "none"],
            ("none", "shortest"),
        ),
        (["--epoch_sync", "none"], {"epoch_sync": "longest"}, [], ("longest", "shortest")),
        ([], {"valid_epoch_sync": False}, [], ("shortest", "none")),
    ],
    ids=str,
)
def test_the_last_wins_for_each_key_by_itself(
    before: list[str],
    config: dict[str, Any],
    after: list[str],
    expected: tuple[str, str],
    package: Path,
) -> None:
    (package / "train.yaml").write_text(yaml.safe_dump(config))
    words = ["-m", "espnet2.bin.lm_train", "--config", "train.yaml", *DRY, "exp", *after]
    ended = run_in_fork([*before, *words], package)
    assert ended.code == 0, ended.err
    written = keys_of(package / "exp")
    assert (written["epoch_sync"], written["valid_epoch_sync"]) == expected


# --- The command line that ESPnet2 prints -----------------------------------------------------


def test_the_printed_command_line_gives_the_same_run_again(package: Path) -> None:
    before = ["--epoch_sync", "longest", "--epoch_sync_conf", "timeout=60"]
    words = ["--lm_conf", "{unit: 2, nlayers: 1}", "--valid_epoch_sync", "none"]
    words += ["--bpemodel", "", "--cleaner", "none", *DRY, "it's $HOME & more"]
    ended = run_in_fork([*before, "-m", "espnet2.bin.lm_train", *words], package)
    assert ended.code == 0, ended.err
    config = package / "it's $HOME & more" / "config.yaml"
    written = config.read_text()
    config.unlink()
    printed = ended.err.splitlines()[0]
    given = ["--epoch_sync=longest", "--epoch_sync_conf=timeout=60"]
    head = [sys.executable, "-m", "espnet_sync", *given, "-m", "espnet2.bin.lm_train"]
    assert shlex.split(printed) == [*head, *words]
    again = run(["bash", "-c", printed], package)
    assert again.code == 0, again.output
    assert config.read_text() == written


# --- Recipes ----------------------------------------------------------------------------------

#: What ESPnet2's recipe templates call Python for, its own `launch` included.
RECIPE = r"""
set -euo pipefail
. ./path.sh
python=python3
while [ $# -gt 0 ]; do
    case "$1" in
        --python) python=$2; shift 2 ;;
        *) exit 2 ;;
    esac
done
echo "stage 1: lists"
@python@ -m espnet2.bin.tokenize_text --token_type char --input text --output tokens.1 \
    --field 2- --cleaner none --g2p none --write_vocabulary true \
    --add_symbol "<blank>:0" --add_symbol "<unk>:1" --add_symbol "<sos/eos>:-1"
@python@ -m espnet2.bin.split_scps --scps text --num_splits 2 --output_dir splits
echo "stage 2: statistics of a corpus with spaces in its name"
@python@ -c 'import sys; print(sys.argv[1:])' "two words"
@python@ - << EOF
print("from standard input")
EOF
echo "stage 3: training"
@python@ -m espnet2.bin.launch --cmd "./run.sh" --log exp/train.log --ngpu 0 --num_nodes 1 \
    --init_file_prefix exp/.dist_init_ --multiprocessing_distributed true -- \
    @python@ -m espnet2.bin.lm_train --token_list tokens.1 --token_type char \
    --dry_run true --output_dir exp --lm_conf unit=2
"""

#: What a recipe names as `--cmd`: a job's options, its log, and the command.
JOB_RUNNER = """#!/usr/bin/env bash
set -euo pipefail
[ "$1" = --gpu ]
log=$3
shift 3
mkdir -p "$(dirname "${log}")"
"$@" > "${log}" 2>&1
"""


@pytest.mark.parametrize(
    ("python", "quoted", "policy"),
    [
        ("espnet_sync", True, "shortest"),
        ("espnet_sync --epoch_sync longest -W ignore", False, "longest"),
    ],
    ids=["quoted", "unquoted, with options"],
)
def test_a_recipe_runs_all_that_it_calls_python_for(
    python: str, quoted: bool, policy: str, tmp_path: Path
) -> None:
    word = '"${python}"' if quoted else "${python}"
    (tmp_path / "recipe.sh").write_text(RECIPE.replace("@python@", word))
    folder = shlex.quote(str(Path(RUNNER).parent))
    (tmp_path / "path.sh").write_text(f"PATH={folder}:${{PATH}}\n")
    (tmp_path / "run.sh").write_text(JOB_RUNNER)
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "text").write_text("utt1 a b\nutt2 b c\nutt3 c a\n")
    ended = run(["bash", "recipe.sh", "--python", python], tmp_path)
    log = tmp_path / "exp" / "train.log"
    assert ended.code == 0, ended.output + (log.read_text() if log.exists() else "")
    assert "['two words']" in ended.output
    assert "from standard input" in ended.output
    assert (tmp_path / "splits" / "text" / "num_splits").read_text() == "2"
    assert "<space>" in (tmp_path / "tokens.1").read_text()
    assert keys_of(tmp_path / "exp")["epoch_sync"] == policy
    printed = " -m espnet_sync -m espnet2.bin.lm_train " if quoted else "--epoch_sync=longest -m "
    assert printed in log.read_text()
