"""Generated files: what is committed is what the sources generate."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from cartridge_proto.manifest import manifest_schema
from cartridge_proto.residency import FailureReason
from cartridge_router.openapi import admin_description, gateway_description
from cartridge_router.settings import settings_schema

ROOT = Path(__file__).parents[2]
PROTO = Path("cartridge_proto/v1")
GENERATED = ["control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py", "control_pb2_grpc.pyi"]


def test_the_committed_schema_is_the_generated_one() -> None:
    """`docs/spec/manifest-v1.schema.json` is what the types say; `.ci/generate` writes it."""
    committed = (ROOT / "docs/spec/manifest-v1.schema.json").read_text()
    assert committed == json.dumps(manifest_schema(), indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize(
    ("name", "described"), [("gateway", gateway_description()), ("admin", admin_description())]
)
def test_the_committed_openapi_is_the_generated_one(name: str, described: dict[str, Any]) -> None:
    """`docs/spec/openapi-*.json` is what the code describes; `.ci/generate` writes it."""
    committed = (ROOT / f"docs/spec/openapi-{name}.json").read_text()
    assert committed == json.dumps(described, indent=2) + "\n"


def test_the_charts_schema_holds_the_settings_schema() -> None:
    """`router.config` of the chart is checked by the schema of the gateway's settings."""
    chart = json.loads((ROOT / "helm/cartridge-router/values.schema.json").read_text())
    expected = json.loads(json.dumps(settings_schema()).replace("#/$defs/", "#/$defs/settings."))
    assert chart["properties"]["router"]["properties"]["config"] == {"$ref": expected["$ref"]}
    parts = {name.removeprefix("settings."): part for name, part in chart["$defs"].items()}
    assert {name: parts[name] for name in expected["$defs"]} == expected["$defs"]


def test_the_worked_example_of_the_specification_is_a_case_of_the_corpus() -> None:
    """The identity that the specification prints is the one that the code computes."""
    text = (ROOT / "docs/spec/virtual-prefix-v1.md").read_text()
    case = ROOT / "tests/corpus/message_sequential_pair_ok"
    expected = json.loads((case / "expected.json").read_bytes())
    message = json.loads((case / "message.json").read_bytes())
    digests = [expected["composition"], expected["fingerprint"]]
    digests += [item["digest"] for item in message["items"]]
    assert [digest for digest in digests if digest not in text] == []
    assert f"cache_salt   {expected['cache_salt']}\n" in text


def test_the_specification_explains_every_failure_reason() -> None:
    """An engine's reader finds each reason of a receipt in the table of duties."""
    text = (ROOT / "docs/spec/virtual-prefix-v1.md").read_text()
    assert [reason for reason in FailureReason if f"| `{reason}` |" not in text] == []


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with freshly generated protobuf code."""
    folder = tmp_path_factory.mktemp("proto")
    scripts = Path(sysconfig.get_path("scripts"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    command += [f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command += [
        f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    command.append(str(PROTO / "control.proto"))
    done = subprocess.run(  # its stderr is the message
        command, check=False, cwd=ROOT / "proto", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", GENERATED)
def test_the_committed_protobuf_code_is_the_generated_one(generated: Path, name: str) -> None:
    """Code generated from `control.proto` is committed as it is; `.ci/generate` writes it."""
    committed = (ROOT / "proto" / PROTO / name).read_text()
    assert committed == (generated / PROTO / name).read_text()


def test_nothing_else_is_generated(generated: Path) -> None:
    """The list of generated files is complete."""
    assert sorted(path.name for path in (generated / PROTO).iterdir()) == GENERATED
