"""The README's blocks: every Python one is run on two ranks, whose data is real and uneven.

A whole script runs under torchrun, with `my_recipe.py` beside it; a command in what is a recipe's
folder to it.
"""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
import yaml

from espnet_sync import SyncedIterFactory
from espnet_sync.report import FILE_NAME, RankReport, SyncReport, append_report
from tests import my_recipe
from tests.factories import NumberFactory
from tests.ranks import run_ranks
from tests.speech import (
    ASR,
    ASR_SOURCES,
    ENHANCEMENT,
    ENHANCEMENT_SOURCES,
    TORCHRUN,
    Ended,
    data_words,
    run,
    write_config,
    write_speech,
)

README = Path(__file__).parent.parent / "README.md"
#: Headings of the Python blocks, by how the tests run them.
LOOP = "espnet_sync"
TRAININGS = ("A Lightning module", "A plain DDP loop", "Hugging Face Accelerate")
SCRIPT = "A recipe script"
#: That the trainings in the README have.
EPOCHS = 2
#: Validation batches before the first epoch, by Lightning's default.
SANITY_BATCHES = {"A Lightning module": 2}


def read_blocks() -> list[tuple[str, str, str]]:
    """Return each block of the README: the heading above it, its language and its text."""
    found = re.finditer(
        r"^#+ (?P<heading>.+)$|^```(?P<language>.*)\n(?P<text>(?:.*\n)*?)```$",
        README.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    blocks, heading = [], ""
    for match in found:
        if match["heading"] is not None:
            heading = match["heading"]
        else:
            blocks.append((heading, match["language"], match["text"]))
    return blocks


def python_block(heading: str) -> str:
    [text] = [text for above, kind, text in read_blocks() if (above, kind) == (heading, "python")]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the scripts find where they run: `my_recipe.py` and the speech."""
    folder = tmp_path_factory.mktemp("readme")
    write_speech(folder / "speech")
    shutil.copy(my_recipe.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def held(folder: Path) -> dict[str, list[int]]:
    """Count the batches that ESPnet2's own factories have for each of two ranks."""
    with contextlib.chdir(folder):
        return {
            mode: [
                sum(1 for _ in my_recipe.build_factory(mode, rank, 2).build_iter(epoch=1))
                for rank in range(2)
            ]
            for mode in ("train", "valid")
        }


def run_script(heading: str, folder: Path, *words: str) -> Ended:
    """Run a script of the README under torchrun, and expect it to succeed."""
    (folder / "script.py").write_text(python_block(heading))
    command = [*TORCHRUN, "--nproc_per_node=2", sys.executable, "script.py", *words]
    ended = run(command, folder, deadline=240)
    assert ended.code == 0, f"exit code {ended.code}: {heading}\n{ended.output[-8000:]}"
    return ended


def test_every_block_has_a_language_and_every_python_block_a_test() -> None:
    blocks = read_blocks()
    assert README.read_text(encoding="utf-8").count("```") == 2 * len(blocks)
    assert {language for _, language, _ in blocks} == {"python", "yaml", "sh"}
    headings = [heading for heading, language, _ in blocks if language == "python"]
    assert sorted(headings) == sorted([LOOP, *TRAININGS, SCRIPT])


def test_ranks_hold_unequal_numbers_of_batches(held: dict[str, list[int]]) -> None:
    for counts in held.values():
        assert counts[0] > counts[1] > 0


def loop(rank: int, world_size: int, folder: Path, block: str) -> list[int]:
    """Run the first loop of the README; gives the epoch of each step."""
    os.chdir(folder)
    names: dict[str, Any] = {
        "factory": my_recipe.build_factory("train"),
        "max_epoch": EPOCHS,
        "steps": [],
    }
    exec(block, names)
    steps: list[int] = names["steps"]
    return steps


def test_the_loop_takes_equal_numbers_of_steps(folder: Path, held: dict[str, list[int]]) -> None:
    block = python_block(LOOP)
    assert block.endswith(" ...\n")
    block = block.replace(" ...\n", " steps.append(epoch)\n")
    steps = [1] * min(held["train"]) + [2] * min(held["train"])
    assert run_ranks(2, loop, folder, block) == [steps, steps]


@pytest.mark.training
@pytest.mark.parametrize("heading", TRAININGS)
def test_a_training_takes_equal_numbers_of_steps(
    heading: str, folder: Path, held: dict[str, list[int]]
) -> None:
    ended = run_script(heading, folder)
    told = [json.loads(line) for line in ended.lines(r"\{\"rank\": .*?\}$")]
    assert sorted(one["rank"] for one in told) == [0, 1], ended.output[-8000:]
    batches = {mode: EPOCHS * min(counts) for mode, counts in held.items()}
    batches["valid"] += SANITY_BATCHES.get(heading, 0)
    assert [one["batches"] for one in told] == [batches, batches]
    assert told[0]["weights"] == told[1]["weights"]


@pytest.mark.training
def test_the_recipe_script_takes_the_readmes_yaml_and_adds_up_the_batches_of_all_ranks(
    folder: Path, held: dict[str, list[int]]
) -> None:
    keys: dict[str, Any] = {}
    for _, language, text in read_blocks():
        keys.update(yaml.safe_load(text) if language == "yaml" else {})
    assert keys
    write_config(folder / "train.yaml", {**ENHANCEMENT, **keys})
    words = data_words(folder / "speech", ENHANCEMENT_SOURCES, ["speech_shape"])
    ended = run_script(SCRIPT, folder, "--config", "train.yaml", *words)
    pattern = r"rank (\d): (\d+) batches, mean power (\S+) at most"
    told = sorted(re.findall(pattern, ended.output))
    assert len(told) == 2, ended.output[-8000:]
    number = (max if keys.get("epoch_sync") == "longest" else min)(held["train"])
    power = told[0][2]
    assert told == [(str(rank), str(number), power) for rank in range(2)]
    assert 0 < float(power) < 1


def prepare(rank: int, world_size: int) -> tuple[int, bool, int]:
    """Have Accelerate prepare this rank's share, as a synced iterator and as a DataLoader."""
    # Takes seconds to import: not when a rank of another test imports this module.
    from accelerate import Accelerator

    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    accelerator = Accelerator(cpu=True)
    iterator = SyncedIterFactory(NumberFactory(4)).build_iter(1)
    loader: Any = torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type]
    same = accelerator.prepare(iterator) is iterator
    return accelerator.num_processes, same, len(accelerator.prepare(loader))


def test_accelerate_leaves_a_synced_iterator_alone_and_deals_a_loader_again() -> None:
    assert run_ranks(2, prepare) == [(2, True, 2)] * 2


# --- The commands -----------------------------------------------------------------------------

#: Starts tasks on this host as Slurm's srun does on several, which the tests do not have.
SRUN = f"""#!{sys.executable}
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("-N", type=int, default=1)
parser.add_argument("--ntasks-per-node", type=int)
parser.add_argument("--ntasks", type=int)
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()
tasks = args.ntasks or args.N * args.ntasks_per_node
started = []
for rank in range(tasks):
    node, local = divmod(rank, tasks // args.N)
    names = dict(PROCID=rank, NTASKS=tasks, NODEID=node, LOCALID=local)
    names.update(STEP_NUM_NODES=args.N, STEP_NODELIST="localhost")
    names = {{f"SLURM_{{name}}": str(value) for name, value in names.items()}}
    started.append(subprocess.Popen(args.command, env={{**os.environ, **names}}))
sys.exit(max(abs(process.wait()) for process in started))
"""
#: Runs a command on this host as ssh does on another, which the tests do not have.
SSH = '#!/bin/sh\nshift; exec sh -c "$*"\n'

IN_STEP = r"\[train\] epoch 1: \d+ batch(?:es)? on each of 2 ranks"
REACH = "All {} ranks on 1 host reach one another"
SMALLER = {"2": "1", "4": "2", "8": "2"}
#: How each command is run, by its program and the module after `-m`: what stands for some of its
#: words, and what it must print. None: it is looked at and not run.
COMMANDS: dict[tuple[str, str], tuple[dict[str, str], str] | None] = {
    ("pip", ""): None,  # the package comes from here
    ("espnet_sync", "espnet2.bin.enh_train"): ({}, r"\[train\] epoch 1: \d+ batches$"),
    ("python", "espnet_sync.plan"): (SMALLER, r"^file order +3 +\d+ \d+ +\d+ \("),
    ("torchrun", "espnet_sync.check"): (SMALLER, REACH.format(2)),
    ("srun", "espnet_sync.check"): (SMALLER, REACH.format(2)),
    ("python", "espnet2.bin.launch"): ({}, REACH.format(4)),
    ("torchrun", "espnet2.bin.asr_train"): (SMALLER, IN_STEP),
    ("./run.sh", ""): None,  # a recipe, on a cluster
    ("srun", "espnet2.bin.asr_train"): ({"4": "0"}, IN_STEP),
    ("python", "espnet_sync.report"): ({}, r"^train +1 .* 2 +9 +rank 1 +3 "),
}


def read_commands() -> list[list[str]]:
    """Return the words of each command in the README's `sh` blocks."""
    return [
        shlex.split(line, comments=True)
        for _, language, text in read_blocks()
        if language == "sh"
        for line in text.replace("\\\n", " ").splitlines()
        if not line.startswith("#")
    ]


def name_command(words: list[str]) -> tuple[str, str]:
    """Return a command's program, and the module after `-m`."""
    return words[0], words[words.index("-m") + 1] if "-m" in words else ""


def training_words(module: str, folder: Path) -> list[str]:
    """Return what stands for ARGS, with the training's YAML written: one epoch on CPUs."""
    config, sources, shapes = ENHANCEMENT, ENHANCEMENT_SOURCES, ["speech_shape"]
    if module == "espnet2.bin.asr_train":
        config = {**ASR, "token_list": str(folder / "speech" / "tokens")}
        sources, shapes = ASR_SOURCES, ["speech_shape", "text_shape"]
    write_config(folder / "args.yaml", {**config, "max_epoch": 1})
    words = ["--config", "args.yaml", "--output_dir", f"exp/{module}", "--dist_backend", "gloo"]
    return [*words, "--ngpu", "0", *data_words(folder / "speech", sources, shapes)]


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    """Write what the commands find in a recipe, and stand-ins for what is not here."""
    (folder / "conf").mkdir()
    write_config(folder / "conf" / "train.yaml", ENHANCEMENT)
    for mode in ("train", "valid"):
        stats = folder / "exp" / "stats" / mode
        stats.mkdir(parents=True)
        shutil.copy(folder / "speech" / mode / "speech_shape", stats / "speech_mix_shape")
    report = SyncReport(
        label="train",
        epoch=1,
        batches=9,
        ended_by=(1,),
        ranks=(RankReport(rank=0, pulled=12, discarded=3), RankReport(rank=1, pulled=9)),
    )
    for run_name in ("enh_train_raw", "a", "b"):
        (folder / "exp" / run_name).mkdir()
        append_report(folder / "exp" / run_name / FILE_NAME, report)
    (folder / "path.sh").touch()
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("ssh", SSH)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


def free_port() -> str:
    with socket.socket() as asked:
        asked.bind(("", 0))
        return str(asked.getsockname()[1])


@pytest.mark.training
@pytest.mark.parametrize(
    "words", [one for one in read_commands() if COMMANDS.get(name_command(one))], ids=" ".join
)
def test_each_command_does_what_the_readme_says(words: list[str], recipe: Path) -> None:
    known = COMMANDS[name_command(words)]
    assert known is not None
    stand_in = {
        "HOST:29500": "localhost:0",
        "29500": free_port(),
        "file:///SHARED/NEW": f"file://{recipe}/NEW",
        **known[0],
    }
    command = [stand_in.get(word, word) for word in words if word != "ARGS"]
    if words[-1] == "ARGS":
        command += training_words(name_command(words)[1], recipe)
    path = f"{recipe / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = run(command, recipe, deadline=240, PATH=path)
    assert ended.code == 0, ended.output[-8000:]
    written = recipe / words[words.index("--log") + 1] if "--log" in words else None
    output = written.read_text() if written else ended.output
    assert re.search(known[1], output, re.MULTILINE), output[-8000:]
    if "--plot" in words:
        assert (recipe / words[-1]).read_bytes().startswith(b"\x89PNG")


def test_each_command_is_known_and_names_what_exists() -> None:
    package = importlib.metadata.metadata("espnet_sync")["Name"]
    scripts = importlib.metadata.entry_points(group="console_scripts").names
    commands = read_commands()
    assert {name_command(words) for words in commands} == COMMANDS.keys()
    assert ["pip", "install", package] in commands
    for program, *words in commands:
        assert program in {"pip", "python", "torchrun", "srun", "./run.sh", *scripts}
        for option, value in itertools.pairwise(words):
            assert option != "-m" or importlib.util.find_spec(value) is not None, value
