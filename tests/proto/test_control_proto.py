"""The control service: its methods, its messages, and its tiers beside the residency tiers."""

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.residency import TIERS_FASTEST_FIRST
from cartridge_proto.v1 import control_pb2

SERVICE = control_pb2.DESCRIPTOR.services_by_name["CartridgeControl"]
uint64s = st.integers(0, 2**64 - 1)


def test_every_method_has_a_request_and_an_answer_of_its_own() -> None:
    """All are unary but Watch, which streams its answers."""
    methods = {
        method.name: (method.input_type.name, method.output_type.name) for method in SERVICE.methods
    }
    unary = [
        "Describe",
        "Lookup",
        "Prefetch",
        "Pin",
        "Unpin",
        "Move",
        "Evict",
        "Drain",
        "Resume",
    ]
    expected = {name: (f"{name}Request", f"{name}Response") for name in unary}
    assert SERVICE.full_name == "cartridge.v1.CartridgeControl"
    assert methods == expected | {"Watch": ("WatchRequest", "WatchEvent")}
    assert [method.name for method in SERVICE.methods if method.server_streaming] == ["Watch"]
    assert not any(method.client_streaming for method in SERVICE.methods)


def test_tiers_on_the_wire_are_the_residency_tiers_in_their_order() -> None:
    """Each residency tier has a wire value, fastest first, after the unspecified one."""
    values = control_pb2.Tier.items()
    expected = ["TIER_UNSPECIFIED", *(f"TIER_{tier.name}" for tier in TIERS_FASTEST_FIRST)]
    assert values == [(name, number) for number, name in enumerate(expected)]


def test_the_engine_identity_travels_as_bytes() -> None:
    """The identity stays the JSON of the registration, so that it is spelled in one place."""
    field = control_pb2.DescribeResponse.DESCRIPTOR.fields_by_name["engine_json"]
    assert field.type == FieldDescriptor.TYPE_BYTES


@given(st.text(st.characters(codec="utf-8")), uint64s, uint64s, st.booleans(), st.binary())
def test_a_description_survives_the_wire(
    replica: str, size_bytes: int, capacity: int, ready: bool, engine: bytes
) -> None:
    """A response is parsed back equal from its bytes."""
    response = control_pb2.DescribeResponse(
        replica=replica,
        ready=ready,
        engine_json=engine,
        dram_capacity_bytes=capacity,
        residents=[
            control_pb2.Resident(
                digest="sha256:x", tier=control_pb2.TIER_DRAM, size_bytes=size_bytes
            )
        ],
    )
    assert control_pb2.DescribeResponse.FromString(response.SerializeToString()) == response


def test_an_absent_answer_claims_nothing() -> None:
    """Defaults are the cautious ones: not ready, not evicted, no tier."""
    assert not control_pb2.DescribeResponse().ready
    assert not control_pb2.EvictResponse().evicted
    assert control_pb2.Resident().tier == control_pb2.TIER_UNSPECIFIED
