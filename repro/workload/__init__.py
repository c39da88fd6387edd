"""The workload: the card's Ray Data pipeline with two knobs, where prep runs and whether copies overlap compute.

    ray.data.range(blocks) -> prep -> H2D -> matmuls -> D2H -> checksum

One block is one task is one batch. The GPU stage is an actor pool of one. Modes:

- ``inline``: prep runs inside the GPU stage, so the GPU waits for it: load, compute, load, compute.
- ``split``: prep is an operator of its own in CPU tasks; the GPU stage copies from pageable memory, computes,
  copies back.
- ``pinned``: split, and the stage pins each batch before the copy, as ``tensor.pin_memory().to("cuda")`` does:
  allocate, host copy, H2D. It stays serial with compute.
- ``overlap``: split with ``enable_true_multi_threading``: two task threads, each with a stream of its own, so one
  batch is copied while another computes.
- ``staged``: split with ``ActorPoolStrategy(pinned_staging=...)``: the stage gets and returns device arrays.
"""
