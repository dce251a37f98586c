"""Connected components of more pairs than fit in memory. Memory grows with the number of documents in pairs."""

import numpy as np

_LEAST_PENDING = 4_000_000


class Clusters:
    """Joins pairs of documents, which arrive in batches, into clusters.

    It keeps the first document of each document's cluster, and pending pairs. These are merged once there are as many
    as documents, so that the work grows with pairs × log(documents).
    """

    def __init__(self, least_pending: int = _LEAST_PENDING):
        self._least_pending = least_pending
        self._forest = np.zeros((0, 2), dtype=np.uint64)  # a document, the first of its cluster
        self._pending: list[np.ndarray] = []
        self._waiting = 0

    def join(self, pairs: np.ndarray) -> None:
        """Puts both documents of each pair into one cluster. `pairs`: (n, 2) uint64."""
        self._waiting += len(pairs)
        self._pending.append(pairs)
        if self._waiting > max(self._least_pending, len(self._forest)):
            self._settle()

    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """(documents (n,) that are in any pair, ascending; the smallest document (n,) of the cluster of each)."""
        self._settle()
        return self._forest[:, 0], self._forest[:, 1]

    def _settle(self) -> None:
        from scipy.sparse import coo_array  # takes 0.5 s to import, and only near-duplicates need it
        from scipy.sparse.csgraph import connected_components

        pairs = np.concatenate([self._forest, *self._pending])
        self._forest, self._pending, self._waiting = pairs[:0], [], 0
        documents = np.unique(pairs)
        ends = np.searchsorted(documents, pairs).astype(np.int32 if len(documents) < 2**31 else np.int64)
        del pairs  # they may take much memory
        graph = coo_array((np.ones(len(ends), dtype=bool), (ends[:, 0], ends[:, 1])), shape=(len(documents),) * 2)
        del ends
        _, cluster = connected_components(graph, directed=False)
        first = documents[np.unique(cluster, return_index=True)[1]]  # documents ascend, so the first is the smallest
        self._forest = np.stack([documents, first[cluster]], axis=1)
