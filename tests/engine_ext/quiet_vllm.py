"""Imports vLLM's connector interface once, with the deprecation warnings of its imports ignored.

Owns the order: a test module that imports this first can import the connector's halves under
"warnings are errors". Takes about ten seconds of CPU, once per test run.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

__all__ = ["base"]
