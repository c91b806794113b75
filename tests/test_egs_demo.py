"""The demo recipe: its options, its data and how it takes faults. Nothing is trained here."""

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

soundfile = pytest.importorskip("soundfile")

RECIPE = Path(__file__).parent.parent / "egs_demo"
DEADLINE = 120.0
"""Seconds that any one command may take."""


def environment() -> dict[str, str]:
    """Return the environment with this Python's own commands first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


def execute(
    command: list[str | Path], folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=folder,
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )


def run_recipe(
    recipe: Path, *options: str | Path, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return execute(["./run.sh", "--python", python, *options], recipe)


def copy_recipe(folder: Path) -> Path:
    made = shutil.ignore_patterns("data", "dump", "exp", "downloads", "__pycache__")
    return Path(shutil.copytree(RECIPE, folder / "egs_demo", ignore=made))


def checksums(*folders: Path) -> dict[str, str]:
    """Return the checksum of each file that stage 1 makes."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".log" and path.name != ".ready"
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recipe in which nothing has run."""
    return copy_recipe(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recipe in which stage 1 has run."""
    recipe = copy_recipe(tmp_path_factory.mktemp("prepared"))
    result = run_recipe(recipe, "--stop_stage", "1")
    assert result.returncode == 0, result.stdout
    return recipe


# Options


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_every_option(recipe: Path, option: str) -> None:
    result = execute(["./run.sh", option], recipe)
    assert result.returncode == 0
    for name in (
        *("stage", "stop_stage", "nproc", "ngpu", "nj", "python", "dumpdir", "expdir", "an4_dir"),
        *("iterator_type", "enh_config", "enh_args", "epoch_sync", "max_epoch"),
    ):
        assert f"--{name} " in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no_such_option", "1"], "unknown option --no_such_option"),
        (["--PATH", "1"], "unknown option --PATH"),
        (["--help_message", "1"], "unknown option --help_message"),
        (["--stage=2"], "write '--stage 2' in place of '--stage=2'"),
        (["-x"], "unknown option -x"),
        (["--stage"], "option --stage needs a value"),
        (["--stage", "0"], "--stage must be an integer from 1 to 5, but got '0'"),
        (["--stage", "6"], "--stage must be an integer from 1 to 5, but got '6'"),
        (["--stop-stage", "x"], "--stop_stage must be an integer from 1 to 5, but got 'x'"),
        (["--stage", "3", "--stop_stage", "2"], "--stage 3 comes after --stop_stage 2"),
        (["--nproc", "0"], "--nproc must be an integer of at least 1, but got '0'"),
        (["--nproc", "-1"], "--nproc must be an integer of at least 1, but got '-1'"),
        (["--nproc", "two"], "--nproc must be an integer of at least 1, but got 'two'"),
        (["--ngpu", ""], "--ngpu must be an integer of at least 0, but got ''"),
        (["--nj", "0"], "--nj must be an integer of at least 1, but got '0'"),
        (["--max_epoch", "0"], "--max_epoch must be an integer of at least 1, but got '0'"),
        (["--iterator_type", "task"], "--iterator_type must be one of: chunk sequence, but got"),
        (["--epoch_sync", "both"], "--epoch_sync must be one of: shortest longest none, but got"),
        (["--enh_config", "conf/none.yaml"], "--enh_config: no such file: conf/none.yaml"),
        (["--an4_dir", "nowhere"], "--an4_dir: no such directory: nowhere"),
        (["--dumpdir", "a b"], "--dumpdir must hold no space or comma, but got 'a b'"),
        (["--expdir", ""], "--expdir must not be empty"),
        (["train"], "no positional arguments are taken, but got: train"),
        (["--stage", "1", "--", "more"], "no positional arguments are taken, but got: more"),
    ],
)
def test_a_wrong_option_is_refused_with_status_2(
    recipe: Path, options: list[str], message: str
) -> None:
    result = execute(["./run.sh", *options], recipe)
    assert result.returncode == 2
    assert message in result.stdout
    assert not (recipe / "exp").exists()


def test_it_runs_from_any_directory(recipe: Path, tmp_path: Path) -> None:
    result = execute([recipe / "run.sh", "--stage", "9"], tmp_path)
    assert result.returncode == 2
    assert "--stage must be an integer" in result.stdout


def test_too_many_gpus_are_refused_before_anything_starts(recipe: Path) -> None:
    result = run_recipe(recipe, "--ngpu", "4096")
    assert result.returncode == 1
    assert "--ngpu 4096, but torch finds" in result.stdout
    assert not (recipe / "exp").exists()


def test_without_espnet_sync_on_path_it_says_what_to_do(recipe: Path, tmp_path: Path) -> None:
    for name in ("bash", "basename", "cat", "date", "dirname", "env", "grep", "sed", "tr"):
        tool = shutil.which(name)
        assert tool is not None
        (tmp_path / name).symlink_to(tool)
    result = execute(["./run.sh"], recipe, {**os.environ, "PATH": str(tmp_path)})
    assert result.returncode == 1
    assert "espnet_sync is not on PATH" in result.stdout
    assert "--python python3" in result.stdout


@pytest.mark.parametrize(
    ("options", "status", "output"),
    [
        ([], 0, "[first] [1] [true]\n"),
        (["--text", ""], 0, "[] [1] [true]\n"),
        (["--text", "--number 3"], 0, "[--number 3] [1] [true]\n"),
        (["--number", "2", "--with-dashes", "false"], 0, "[first] [2] [false]\n"),
        (["--with_dashes", "no"], 2, "option --with_dashes must be true or false, but got 'no'"),
        (["--with_dashes", ""], 2, "option --with_dashes must be true or false, but got ''"),
        (["--from_environment", "1"], 2, "unknown option --from_environment"),
    ],
)
def test_options_become_variables(
    tmp_path: Path, options: list[str], status: int, output: str
) -> None:
    script = tmp_path / "script.sh"
    script.write_text(
        "set -euo pipefail\ntext=first\nnumber=1\nwith_dashes=true\n"
        f". {RECIPE}/utils/parse_options.sh\n"
        'echo "[${text}] [${number}] [${with_dashes}]"\n'
    )
    result = execute(
        ["bash", script, *options], tmp_path, environment() | {"from_environment": "x"}
    )
    assert result.returncode == status
    assert output in result.stdout


# Faults


@pytest.mark.parametrize("stage", [2, 3, 4, 5])
def test_a_stage_whose_input_is_missing_says_which_to_run(recipe: Path, stage: int) -> None:
    result = run_recipe(recipe, "--stage", str(stage))
    assert result.returncode == 1
    assert f"stage {stage} needs data/.ready: run stage 1 first (--stage 1)" in result.stdout


def truncated_archive(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(RECIPE / "run.sh", "downloads/an4/run.sh")
    path.write_bytes(path.read_bytes()[:-200])


def unsafe_archive(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(RECIPE / "run.sh", "../escaped.sh")


def other_archive(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(RECIPE / "run.sh", "downloads/run.sh")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no archive at"),
        (lambda path: path.write_text("no archive"), "can't be unpacked"),
        (truncated_archive, "can't be unpacked"),
        (unsafe_archive, "OutsideDestinationError"),
        (other_archive, "it has no downloads/an4"),
    ],
    ids=["missing", "text", "truncated", "unsafe", "other"],
)
def test_a_bad_archive_is_refused(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    recipe = copy_recipe(tmp_path)
    archive = tmp_path / "archive.tar.gz"
    make(archive)
    result = run_recipe(recipe, "--archive", archive)
    assert result.returncode == 1
    assert "stage 1 failed with exit status 1" in result.stdout
    assert message in result.stdout
    assert "Traceback" not in result.stdout
    assert not (recipe / "downloads").exists()
    assert not (recipe / "data/train").exists()
    assert [path.name for path in recipe.iterdir() if path.name.startswith(".unpacking")] == []
    assert not (tmp_path / "escaped.sh").exists()


def test_a_directory_that_is_no_an4_is_refused(tmp_path: Path) -> None:
    recipe = copy_recipe(tmp_path)
    (tmp_path / "empty").mkdir()
    result = run_recipe(recipe, "--an4_dir", tmp_path / "empty")
    assert result.returncode == 1
    assert "Error: no AN4 speech in" in result.stdout
    assert "wav/an4_clstk/SPEAKER/*.sph" in result.stdout
    assert "Traceback" not in result.stdout


def fake_python(path: Path, command: str) -> str:
    path.write_text(
        f'#!/bin/sh\ncase "$1" in local/check_environment.py) exit 0 ;; esac\n{command}\n'
    )
    path.chmod(0o755)
    return str(path)


def test_a_failing_stage_prints_the_tail_of_its_log(tmp_path: Path) -> None:
    recipe = copy_recipe(tmp_path)
    python = fake_python(tmp_path / "python", "seq 100; echo the last words >&2; exit 7")
    result = run_recipe(recipe, python=python)
    assert result.returncode == 1
    assert "stage 1 failed with exit status 7. The last lines of data/" in result.stdout
    assert "\n71\n" not in result.stdout
    assert "\n72\n" in result.stdout
    assert result.stdout.endswith("100\nthe last words\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_recipe_and_what_it_started(
    tmp_path: Path, signum: signal.Signals
) -> None:
    recipe = copy_recipe(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    python = fake_python(tmp_path / "python", f'echo $$ >"{fifo}"; exec tail -f /dev/null')
    process = subprocess.Popen(
        ["./run.sh", "--python", python],
        cwd=recipe,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert select.select([reader], [], [], DEADLINE)[0], "the recipe started nothing"
        child = int(os.read(reader, 100))
        process.send_signal(signum)
        output, _ = process.communicate(timeout=DEADLINE)
    finally:
        os.close(reader)
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 128 + signum
    assert "stopping." in output
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# Data


def test_stage_1_makes_complete_data(prepared: Path) -> None:
    for split, minimum in (("train", 64), ("valid", 12), ("test", 12)):
        lines = (prepared / "data" / split / "wav.scp").read_text().splitlines()
        assert len(lines) >= minimum
    for split in ("train", "valid"):
        for key in ("speech_mix", "speech_ref1"):
            shapes = prepared / "exp/enh_stats_16k" / split / f"{key}_shape"
            ids = [line.split()[0] for line in shapes.read_text().splitlines()]
            wavs = (prepared / "data" / split / "wav.scp").read_text().splitlines()
            assert ids == [line.split()[0] for line in wavs]


def test_half_written_data_is_noticed_and_rebuilt_byte_by_byte(prepared: Path) -> None:
    folders = (prepared / "data", prepared / "dump", prepared / "exp/enh_stats_16k/train")
    whole = checksums(*folders)
    wav_scp = prepared / "data/train/wav.scp"
    wav_scp.write_text(wav_scp.read_text()[:-30])
    (prepared / "data/valid/spk2utt").unlink()
    next((prepared / "dump/raw/test/mix").iterdir()).unlink()
    (prepared / "data/.building/train").mkdir(parents=True)
    (prepared / "dump/.building/train").mkdir(parents=True)

    result = run_recipe(prepared, "--stage", "2")
    assert result.returncode == 1
    assert "data/train/wav.scp: the last line is cut off" in result.stdout
    assert "data/valid/spk2utt: missing" in result.stdout
    assert "can't be read" in result.stdout
    assert "run stage 1 again" in result.stdout

    result = run_recipe(prepared, "--stop_stage", "1", "--nj", "3")
    assert result.returncode == 0, result.stdout
    assert "Successfully finished. [elapsed=" in result.stdout
    assert checksums(*folders) == whole


@pytest.fixture
def data_dirs(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the data whose paths lead into the copy."""
    shutil.copytree(prepared / "data", tmp_path / "data")
    shutil.copytree(prepared / "dump", tmp_path / "dump")
    return tmp_path


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def first_wav(data_dirs: Path, name: str) -> Path:
    return data_dirs / (data_dirs / "data/train" / name).read_text().split()[1]


def resample(data_dirs: Path, rate: int) -> None:
    for name in ("wav.scp", "spk1.scp"):
        samples, _ = soundfile.read(first_wav(data_dirs, name))
        soundfile.write(first_wav(data_dirs, name), samples, rate)


def shorten(data_dirs: Path) -> None:
    samples, rate = soundfile.read(first_wav(data_dirs, "spk1.scp"))
    soundfile.write(first_wav(data_dirs, "spk1.scp"), samples[:-1], rate)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda d: shutil.rmtree(d / "data/train"), "train: no such directory"),
    "no file": (lambda d: (d / "data/train/utt2spk").unlink(), "utt2spk: missing"),
    "empty": (lambda d: (d / "data/train/wav.scp").write_text(""), "wav.scp: empty"),
    "cut off": (
        lambda d: edit(d / "data/train/wav.scp", lambda x: [*x[:-1], x[-1].rstrip()]),
        "wav.scp: the last line is cut off",
    ),
    "unsorted": (
        lambda d: edit(d / "data/train/wav.scp", lambda x: [x[1], x[0], *x[2:]]),
        "wav.scp:2: not sorted",
    ),
    "twice": (
        lambda d: edit(d / "data/train/utt2spk", lambda x: [x[0], *x]),
        "utt2spk:2: fash_train00000 is there twice",
    ),
    "no value": (
        lambda d: edit(d / "data/train/spk1.scp", lambda x: [x[0].split()[0] + "\n", *x[1:]]),
        "spk1.scp:1: expected 'key value...'",
    ),
    "line missing": (
        lambda d: edit(d / "data/train/spk1.scp", lambda x: x[1:]),
        "spk1.scp: no line for fash_train00000",
    ),
    "line too many": (
        lambda d: edit(d / "data/train/wav.scp", lambda x: x[1:]),
        "wav.scp: no line for fash_train00000",
    ),
    "other speaker": (
        lambda d: edit(d / "data/train/utt2spk", lambda x: ["fash_train00000 fbbh\n", *x[1:]]),
        "utt2spk: fash_train00000 does not start with its speaker fbbh",
    ),
    "spk2utt": (
        lambda d: edit(d / "data/train/spk2utt", lambda x: x[1:]),
        "spk2utt: differs from utt2spk for speaker fash",
    ),
    "no wav": (lambda d: first_wav(d, "wav.scp").unlink(), "fash_train00000 can't be read"),
    "broken wav": (
        lambda d: first_wav(d, "spk1.scp").write_bytes(b"RIFF"),
        "fash_train00000 can't be read",
    ),
    "rate": (lambda d: resample(d, 8000), "fash_train00000 has a sampling rate of 8000 Hz"),
    "length": (shorten, "25777 in its reference"),
    "seen speaker": (
        lambda d: [
            shutil.rmtree(d / "data/train"),
            shutil.copytree(d / "data/test", d / "data/train"),
        ],
        "train: shares fcaw mmxg with data/test",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds(data_dirs: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(data_dirs)
    check = RECIPE / "local/check_data_dir.py"
    result = execute(
        [
            sys.executable,
            check,
            "--fs",
            "16000",
            "--unseen",
            "data/test",
            "data/train",
            "data/test",
        ],
        data_dirs,
    )
    assert result.returncode == 1
    assert message in result.stdout
    assert "Traceback" not in result.stdout


def test_the_check_passes_good_data(data_dirs: Path) -> None:
    check = RECIPE / "local/check_data_dir.py"
    result = execute([sys.executable, check, "data/train", "data/valid", "data/test"], data_dirs)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("all good") == 3


# The closing table


def end(ended: str, train: list[int], seconds: float = 20.0) -> dict[str, object]:
    return {
        "ended": ended,
        "train": train,
        "valid": [3] * len(train),
        "place": "gradient all-reduce of train batch 3",
        "error": "",
        "seconds": seconds,
    }


DEADLOCK = [end("peer left", [2]), end("timeout", [2])]
SYNCED = [end("finished", [2]), end("finished", [2])]


@pytest.mark.parametrize(
    ("counts", "unsynced", "synced", "status", "message"),
    [
        ([2, 4], DEADLOCK, SYNCED, 0, "deadlock in the gradient all-reduce of train batch 3"),
        ([2, 2], SYNCED, SYNCED, 0, "finished"),
        ([2, 4], SYNCED, SYNCED, 1, "uneven ranks must deadlock without sync"),
        ([2, 4], [DEADLOCK[0]] * 2, SYNCED, 1, "uneven ranks must deadlock without sync"),
        ([2, 4], [end("timeout", [2], 3.0)] * 2, SYNCED, 1, "no rank waited for the group's"),
        ([3, 4], DEADLOCK, SYNCED, 1, "all ranks must stop after 3 batches without sync, but"),
        ([2, 2], DEADLOCK, SYNCED, 1, "even ranks must finish without sync"),
        ([2, 4], DEADLOCK, DEADLOCK, 1, "all ranks must finish with sync"),
        ([2, 4], DEADLOCK, [SYNCED[0], end("finished", [3])], 1, "train batches differ with sync"),
        ([2, 4], DEADLOCK[:1], SYNCED, 1, "rank 1 left no"),
    ],
)
def test_only_the_right_ends_are_accepted(
    tmp_path: Path,
    counts: list[int],
    unsynced: list[dict[str, object]],
    synced: list[dict[str, object]],
    status: int,
    message: str,
) -> None:
    (tmp_path / "counts.json").write_text(json.dumps([{"train": [count]} for count in counts]))
    for name, outcomes in (("unsynced", unsynced), ("synced", synced)):
        (tmp_path / name).mkdir()
        for rank, outcome in enumerate(outcomes):
            path = tmp_path / name / f"rank.{rank}.json"
            path.write_text(json.dumps({"rank": rank, **outcome}))
    result = execute(
        [
            *(sys.executable, RECIPE / "local/final_table.py", "--counts", "counts.json"),
            *("--unsynced", "unsynced", "--synced", "synced", "--epochs", "1", "--timeout", "15"),
        ],
        tmp_path,
    )
    assert result.returncode == status, result.stdout
    assert message in result.stdout
