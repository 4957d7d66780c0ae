"""EAGLE3 on a CPU with SGLang 0.5.14, which has neither kernels nor an attention backend for it there.

``install`` replaces, from outside, what SGLang would call: the speculative operations (chains, ``topk`` =
1), the ``torch_native`` attention backend, the dense layers, and the sampler of the verify step. Plain
serving gains too. Start the server with ``--attention-backend torch_native --sampling-backend pytorch
--disable-overlap-schedule``.

Everything that computes is importable without SGLang; only the ``install`` functions import it.
"""

import torch


def install() -> None:
    """Make this process able to serve on a CPU. Call it once, while SGLang loads its plugins."""
    from tide_platform.engine.cpu import attention, dense, draft, sampling, speculative_ops

    speculative_ops.install()
    attention.install()
    dense.install()
    draft.install()
    sampling.install()


def unpack(model: torch.nn.Module) -> None:
    """Forget what was derived from the weights of ``model``. Call it after every change of its weights."""
    from tide_platform.engine.cpu.dense import unpack as drop

    drop(model)
