"""langchain-openai, run against a listening gateway."""

from cartridge_proto.stores import LocalStore
from tests.conformance.conftest import See, StartUrl
from tests.conformance.model_engine import PROMPT_TOKENS, SAID, VECTOR, WORDS
from tests.loadtest.replica_client import StartReplica, mark_of
from tests.router.fleets import named, start_replicas
from tests.router.gateway_client import quick_gateway
from tests.router.stored_cartridges import put_cartridge

TOTAL_TOKENS = PROMPT_TOKENS + len(WORDS)


async def test_invoke(see: See, gateway: str) -> None:
    """A whole answer, with its usage."""
    assert await see("langchain", "invoke", gateway) == [SAID, TOTAL_TOKENS]


async def test_stream(see: See, gateway: str) -> None:
    """Chunks add up to the answer and its usage."""
    assert await see("langchain", "stream", gateway) == [list(WORDS), TOTAL_TOKENS]


async def test_astream(see: See, gateway: str) -> None:
    """Eight asynchronous streams at once all come to their end."""
    assert await see("langchain", "astream", gateway) == [SAID] * 8


async def test_bound_tools(see: See, gateway: str) -> None:
    """A call of a bound tool is parsed."""
    assert await see("langchain", "tools", gateway) == [["opening_hours", {"place": "harbour"}]]


async def test_responses(see: See, gateway: str) -> None:
    """The library's other way to ask, `/v1/responses`."""
    assert await see("langchain", "responses", gateway) == SAID


async def test_embeddings(see: See, gateway: str) -> None:
    """Vectors of documents and of a query."""
    assert await see("langchain", "embeddings", gateway) == [list(VECTOR)] * 3


async def test_a_cartridge(
    see: See, start_url: StartUrl, start_replica: StartReplica, store: LocalStore
) -> None:
    """`extra_body` of a model names a Cartridge: its bytes make the answer."""
    manifest = put_cartridge(store)
    replicas = await start_replicas(start_replica, 1, store)
    url = await start_url(quick_gateway(*named(replicas), store=store))
    assert mark_of(store, manifest) in await see("langchain", "cartridge", url, "harbour-rules@1")
