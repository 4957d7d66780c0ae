"""Stand-in for sgl_kernel: the names that SGLang 0.5.23 imports on a CPU, none of what they do (README.md)."""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+tide.standin"


def _missing(name: str) -> Callable[..., NoReturn]:
    """A callable that refuses, naming ``name``; not an error before it is called, so that imports work."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this server has a stand-in for sgl_kernel, without its kernels; "
            "to use them build sgl_kernel for CPUs (patches/sgl_kernel/README.md)"
        )

    refuse.__name__ = name
    return refuse


assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _missing("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
