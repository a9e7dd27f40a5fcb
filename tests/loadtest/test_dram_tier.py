"""The simulated dram tier: bounds, recency, single flight, and what it publishes when."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.dram_tier import DramTier, LoadedArtifact, PayloadTooLarge
from cartridge_proto.digest import Digest, sha256_digest
from tests.proto.sample_artifact import sample_artifact

MANIFEST, _ = sample_artifact()


def digest_of(number: int) -> Digest:
    """The digest that stands for artifact `number`."""
    return sha256_digest(str(number).encode())


class Notebook:
    """A store and a publisher in one: sizes by digest, fetch counts, and the rows now visible."""

    def __init__(self, sizes: dict[Digest, int]) -> None:
        self.sizes = sizes
        self.fetches: Counter[Digest] = Counter()
        self.rows: dict[Digest, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, digest: Digest) -> LoadedArtifact:
        """Count the fetch and return an artifact of the digest's size."""
        self.fetches[digest] += 1
        await self.gate.wait()
        await asyncio.sleep(0)
        return LoadedArtifact(
            manifest=MANIFEST, payload_digest=digest, size_bytes=self.sizes[digest]
        )

    def put(self, digest: Digest, size_bytes: int) -> None:
        """Show a row."""
        self.rows[digest] = size_bytes

    async def withdraw(self, digest: Digest) -> None:
        """Hide a row, after other tasks had their turn."""
        await asyncio.sleep(0)
        del self.rows[digest]


def tier_with(capacity_bytes: int, notebook: Notebook) -> DramTier:
    """A tier over the notebook."""
    return DramTier(capacity_bytes=capacity_bytes, fetch=notebook.fetch, notes=notebook)


async def test_one_fetch_serves_all_who_ask_at_once() -> None:
    """Loads of the same artifact share a flight; a later one finds it resident."""
    digest = digest_of(1)
    notebook = Notebook({digest: 10})
    tier = tier_with(10, notebook)
    artifacts = await asyncio.gather(*(tier.load(digest) for _ in range(5)))
    assert len({id(artifact) for artifact in artifacts}) == 1
    await tier.load(digest)
    assert notebook.fetches == {digest: 1}


async def test_a_caller_that_gives_up_leaves_the_load_to_others() -> None:
    """Cancelling one waiter does not cancel the flight."""
    digest = digest_of(1)
    notebook = Notebook({digest: 10})
    notebook.gate.clear()
    tier = tier_with(10, notebook)
    first, second = (asyncio.create_task(tier.load(digest)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    notebook.gate.set()
    assert (await second).payload_digest == digest
    assert notebook.fetches == {digest: 1}


async def test_the_least_recently_used_goes_first() -> None:
    """A use moves an artifact to the safe end."""
    one, two, three = (digest_of(number) for number in range(3))
    notebook = Notebook(dict.fromkeys((one, two, three), 10))
    tier = tier_with(20, notebook)
    for digest in (one, two, one, three):
        await tier.load(digest)
    assert list(tier.residents()) == [one, three]
    assert set(notebook.rows) == {one, three}


async def test_what_cannot_fit_evicts_nothing() -> None:
    """An artifact larger than the tier is refused, and the residents stay."""
    small, large = digest_of(1), digest_of(2)
    notebook = Notebook({small: 10, large: 11})
    tier = tier_with(10, notebook)
    await tier.load(small)
    with pytest.raises(PayloadTooLarge, match="11 bytes in a tier of 10"):
        await tier.load(large)
    assert tier.is_resident(small)


async def test_closing_ends_the_loads_under_way() -> None:
    """A load that is cut by `close` ends its waiters and leaves nothing behind."""
    digest = digest_of(1)
    notebook = Notebook({digest: 10})
    notebook.gate.clear()
    tier = tier_with(10, notebook)
    waiter = asyncio.create_task(tier.load(digest))
    await asyncio.sleep(0)
    await tier.close()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert tier.residents() == {}


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    rounds=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=8),
)
def test_accounts_and_rows_always_match_the_residents(
    sizes: list[int], rounds: list[list[int]]
) -> None:
    """After any rounds of simultaneous loads, bytes add up and rows equal residents."""

    async def play() -> None:
        notebook = Notebook({digest_of(number): size for number, size in enumerate(sizes)})
        tier = tier_with(12, notebook)
        for wanted in rounds:
            loads = [tier.load(digest_of(number % len(sizes))) for number in wanted]
            for artifact in await asyncio.gather(*loads):
                assert artifact.payload_digest in notebook.sizes
            tier.check_invariants()
            held = {digest: a.size_bytes for digest, a in tier.residents().items()}
            assert notebook.rows == held
            assert tier.used_bytes == sum(held.values())

    asyncio.run(play())
