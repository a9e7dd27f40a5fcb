"""`vllm bench serve`, begun by its own functions.

Owns nothing but the start: the command `vllm` looks up the version of a distribution named `vllm`,
and CPU builds are named otherwise. Refuses no argument.
"""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
