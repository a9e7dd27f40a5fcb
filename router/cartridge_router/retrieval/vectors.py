"""The passages of one index that lie nearest to a question.

Owns the choice of structure: all of them up to 20,000 vectors, clusters above. Refuses graphs:
HNSW took 76 s to build at 100,000 vectors where clusters take 2.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cartridge_router.retrieval.embedders import Vectors, import_extra

FLAT_MAX_VECTORS = 20_000
NUM_PROBES = 16
TRAIN_VECTORS_PER_CLUSTER = 40
SEED = 1234


@dataclass(frozen=True)
class PassageVectors:
    """float32 [n, dim], rows of length 1; the structure over them is made when first asked."""

    rows: Vectors

    @property
    def is_flat(self) -> bool:
        """Whether every row is looked at."""
        return len(self.rows) <= FLAT_MAX_VECTORS

    def nearest(self, vector: Vectors, count: int) -> tuple[npt.NDArray[np.int64], Vectors]:
        """Numbers of about the `count` most similar rows, and their similarities."""
        similarities, rows = self._structure.search(
            np.ascontiguousarray(vector[None], np.float32), min(count, len(self.rows))
        )
        found = rows[0] >= 0
        return rows[0][found], similarities[0][found]

    @cached_property
    def _structure(self) -> Any:
        faiss = import_extra("faiss", "selection")
        rows = np.ascontiguousarray(self.rows, np.float32)
        dim = rows.shape[1]
        if self.is_flat:
            flat = faiss.IndexFlatIP(dim)
            flat.add(rows)
            return flat
        num_clusters = int(math.sqrt(len(rows)) * 2)
        coarse = faiss.IndexFlatIP(dim)
        # Eight bits per number: 4x less memory to read than float32; similarities that count are
        # computed again from the rows.
        clusters = faiss.IndexIVFScalarQuantizer(
            coarse, dim, num_clusters, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        clusters.own_fields = False
        clusters.nprobe = NUM_PROBES
        clusters.cp.seed = SEED
        clusters.cp.niter = 8
        clusters.cp.max_points_per_centroid = TRAIN_VECTORS_PER_CLUSTER
        clusters.train(rows)
        clusters.add(rows)
        return clusters

    def warm(self) -> None:
        """Make the structure now, so that no question waits for it."""
        _ = self._structure
