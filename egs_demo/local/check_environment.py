"""Check before anything starts that this Python has what the recipe needs."""

import argparse
import importlib.util
import sys

MODULES = ("espnet2", "torch", "soundfile", "tabulate", "fast_bss_eval", "yaml")


def main() -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ngpu", type=int, required=True, help="GPUs that training will use")
    args = parser.parse_args()

    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"Error: {sys.executable} has no {', '.join(missing)}: install the demo's "
            "requirements, e.g. pip install 'espnet_sync[demo]'",
            file=sys.stderr,
        )
        return 1
    if args.ngpu > 0:
        import torch

        found = torch.cuda.device_count()
        if found < args.ngpu:
            print(
                f"Error: --ngpu {args.ngpu}, but torch finds {found} GPU(s) here: give a smaller "
                "--ngpu, or --ngpu 0 with --nproc for ranks on the CPU",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
