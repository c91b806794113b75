"""What README quotes, measured: `python -m tests.benchmarks [NAME ...]`."""
