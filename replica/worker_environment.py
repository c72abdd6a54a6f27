"""What a worker's environment has unless the operator says otherwise: what libraries read as they load. No torch.

Memory. A step allocates megabytes and frees them again, hundreds of times. glibc gets such pieces from the kernel and
gives them back each time, and the kernel clears every page of them anew: a step of 32 sequences then spends more time
on that than on attention. So nothing is given back: pieces of any size come from one heap, which stays as large as the
largest step made it. One heap, because the others that glibc gives to threads cannot hold large pieces. In huge pages,
where the kernel offers them on request, since weights are read from end to end: 8 % off a product of few rows. And with
more small pieces at hand, not to be merged whenever a large one is freed, because a product asks for some thirty of
them: another 13 % off the smallest ones.

Threads. Those of OpenMP wait for each other, and for the next product, in a loop: by default 300,000 rounds, 4-14 ms,
before they sleep. If somebody else needs their core meanwhile, be it this replica's engine, all of them wait until the
kernel takes it from one that only waits: on two busy cores a product of 0.1 ms took 10. After 5,000 rounds, 0.1 to 0.2
ms, a waiting thread gives its core away; between the products of a step it does not come to that.

oneDNN. It prepares code for each size of a product, and keeps it: by default for 1024 sizes, in torch's bridge to it
once more. kernels/packed_linear.py bounds the sizes that occur to some tens for each shape of a weight.
"""

from __future__ import annotations

from typing import Final

_MALLOC: Final = {
    "hugetlb": 1,  # madvise
    "mmap_max": 0,
    "trim_threshold": 2**62,
    "top_pad": 64 * 2**20,  # the heap grows by so much
    "arena_max": 1,
    "tcache_count": 200,
    "mxfast": 0,
}
WORKER_ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()),
    "GOMP_SPINCOUNT": "5000",
    "LRU_CACHE_CAPACITY": "512",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
}
