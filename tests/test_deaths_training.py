"""What the ranks of an ESPnet2 training say when one of them fails, spawned and under torchrun."""

import json
import re
from pathlib import Path

import pytest

from tests.speech import (
    ENHANCEMENT,
    ENHANCEMENT_SOURCES,
    ON_CPU_RANKS,
    RUNNER,
    TORCHRUN,
    data_words,
    run,
    train,
    write_config,
    write_speech,
)

pytestmark = pytest.mark.training

#: A user's own task, one rank of which fails in a step, for want of memory.
FAILING_TRAINING = '''
import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from espnet2.tasks.enh import EnhancementTask
from torch.multiprocessing.spawn import ProcessContext

RANKS = 4


class FailingTask(EnhancementTask):
    @classmethod
    def build_model(cls, args):
        model = super().build_model(args)
        if torch.distributed.get_rank() == getattr(args, "fails_in_step", 1):
            steps = []

            def fail(module, words):
                steps.append(1)
                if len(steps) == 2:
                    torch.empty(1 << 55, dtype=torch.uint8)

            model.register_forward_pre_hook(fail)
        return model


def spawn(args):
    """Start the workers as ESPnet2 does for several GPUs, from a server that has it imported."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["espnet2.tasks.enh", "espnet_sync.task"])
    processes, error_files = [], []
    for rank in range(RANKS):
        own = argparse.Namespace(**vars(args))
        own.local_rank = own.dist_rank = rank
        process = context.Process(target=FailingTask.main_worker, args=(own,), daemon=False)
        process.start()
        processes.append(process)
        error_files.append(tempfile.mktemp(dir=args.output_dir))
    while not ProcessContext(processes, error_files).join():
        pass


def main(cmd=None):
    if "RANK" in os.environ:
        return FailingTask.main(cmd=cmd)
    args = FailingTask.get_parser().parse_args(cmd)
    args.version = "0"
    args.distributed = True
    args.dist_world_size = RANKS
    folder = Path(args.output_dir).absolute()
    for index, fault in enumerate(json.loads(os.environ["FAULTS"])):
        args.output_dir = str(folder / str(index))
        args.dist_init_method = f"file://{folder / str(index)}.meeting"
        (folder / str(index)).mkdir(parents=True)
        args.fails_in_step = fault.get("memory", -1)
        lost = Path(fault.get("file", "/dev/null"))
        if "file" in fault:
            lost.rename(f"{lost}.lost")
        if "disk" in fault:
            (folder / str(index) / "checkpoint.pth").symlink_to("/dev/full")
        try:
            spawn(args)
        except Exception as error:
            print(f"RUN {index} ENDED: {error}", flush=True)
        if "file" in fault:
            Path(f"{lost}.lost").rename(lost)


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech(tmp_path_factory.mktemp("speech"))


def last_words(output: str) -> dict[int, list[str]]:
    """Return each rank's lines about another rank."""
    said: dict[int, list[str]] = {}
    for rank, line in re.findall(
        r"^\[[^]]*:(\d)/\d\] .*\(roll_call:\d+\) ERROR: (.*)", output, re.M
    ):
        said.setdefault(int(rank), []).append(line)
    return said


def test_the_rank_to_blame_is_named_by_the_parent_and_by_every_other_rank(
    speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_train.py").write_text(FAILING_TRAINING)
    sounds = [line.split()[1] for line in (speech / "train" / "wav.scp").read_text().splitlines()]
    faults: list[dict[str, object]] = [{"file": sound} for sound in sounds[:5]]
    faults += [{"memory": 2}, {"memory": 0}, {"disk": "full"}]
    words = data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    words += ["--ngpu", "0", "--dist_backend", "gloo", "--valid_batch_size", "4"]
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    ended = train("failing_train", tmp_path, ENHANCEMENT, *words, ranks=1)
    reasons = [re.escape(sound) for sound in sounds[:5]]
    reasons += ["after batch 2: RuntimeError: .* can't allocate memory"] * 2
    reasons += [r"left \[valid\] epoch 1, .*: RuntimeError: .*inline_container"]
    *runs, _ = re.split(r"(?<=\n)RUN \d ENDED: ", ended.output)
    parents = ended.lines(r"^RUN \d ENDED: process (\d) terminated with exit code 1$")
    assert len(parents) == len(runs) == len(faults)
    for blamed, output, reason in zip(parents, runs, reasons, strict=True):
        said = last_words(output)
        assert set(said) == {0, 1, 2, 3} - {int(blamed)}
        for lines in said.values():
            assert len(lines) == 1
            assert re.search(rf"rank {blamed}\b.*{reason}", lines[0])
        assert len(re.findall("^Process ForkServerProcess-", output, re.M)) == 1
    assert parents[5:] == ["2", "0", "0"]


def test_under_torchrun_too_the_other_rank_says_why(speech: Path, tmp_path: Path) -> None:
    (tmp_path / "failing_train.py").write_text(FAILING_TRAINING)
    write_config(tmp_path / "exp.yaml", ENHANCEMENT)
    words = data_words(speech, ENHANCEMENT_SOURCES, ["speech_shape"])
    command = [*TORCHRUN, "--nproc_per_node=2", RUNNER, "-m", "failing_train", *words]
    command += ["--config", "exp.yaml", "--output_dir", "exp", *ON_CPU_RANKS]
    ended = run(command, tmp_path)
    assert ended.code == 1
    ((said,),) = last_words(ended.output).values()
    assert "rank 1 left [train] epoch 1, after batch 2: RuntimeError: [enforce fail" in said
    # torchrun's own account: the first to fail.
    assert ended.lines(r"rank +: 1 \(local_rank: 1\)")
