"""Unpack the AN4 speech and the noise that espnet's own wheel carries."""

import argparse
import hashlib
import importlib.util
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = Path("mini_an4/esp2_asr/downloads.tar.gz")
MARKER = ".archive_sha256"


def find_archive() -> Path:
    """Locate the archive in the installed espnet.

    Returns:
        The path of the archive, which may not exist.

    Raises:
        FileNotFoundError: If the installed espnet has no `egs3` package.
    """
    spec = importlib.util.find_spec("egs3")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the installed espnet has no 'egs3' package, which carries the demo's speech: "
            "install espnet >= 202611 from its wheel, or give --archive FILE"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return next((f / ARCHIVE for f in folders if (f / ARCHIVE).is_file()), folders[0] / ARCHIVE)


def unpack(archive: Path, output_dir: Path) -> bool:
    """Unpack an archive whose files lie below one `downloads` folder.

    The folder appears whole or not at all: it is filled under another name and renamed.

    Args:
        archive: The .tar.gz file.
        output_dir: What becomes of `downloads`. Replaced if it came from another archive.

    Returns:
        False if `output_dir` holds this very archive already.

    Raises:
        FileNotFoundError: If there is no archive.
        FileExistsError: If `output_dir` holds something that this function did not write.
        tarfile.TarError: If the archive is damaged or has unsafe members.
    """
    if not archive.is_file():
        raise FileNotFoundError(
            f"no archive at {archive}: reinstall espnet >= 202611 from its wheel, "
            "or give --archive FILE"
        )
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    marker = output_dir / MARKER
    if marker.is_file() and marker.read_text(encoding="utf-8").strip() == checksum:
        return False
    if output_dir.exists() and not marker.is_file() and any(output_dir.iterdir()):
        raise FileExistsError(f"{output_dir} was not made by this recipe: move it away first")

    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=output_dir.parent) as folder:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(folder, filter="data")
        unpacked = Path(folder) / "downloads"
        for part in ("an4", "noise"):
            if not (unpacked / part).is_dir():
                raise tarfile.ReadError(f"it has no downloads/{part}")
        (unpacked / MARKER).write_text(checksum + "\n", encoding="utf-8")
        if output_dir.exists():
            shutil.rmtree(output_dir)
        unpacked.rename(output_dir)
    return True


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", default="", help="default: the one in the installed espnet")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()

    archive: Path | None = None
    try:
        archive = Path(args.archive) if args.archive else find_archive()
        fresh = unpack(archive, args.output_dir)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        print(
            f"Error: the archive {archive} can't be unpacked ({type(error).__name__}: {error}): "
            "reinstall espnet from its wheel, or give another with --archive FILE",
            file=sys.stderr,
        )
        return 1
    print(f"{'Unpacked' if fresh else 'Already unpacked'}: {archive} -> {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
