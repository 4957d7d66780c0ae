"""How the documents of a batch lie in memory, and what each root may see. The draft's arithmetic is the same.

A *document* is a sample's stretch of context positions; its last positions are roots. ``LeftPadded``: one
document a row, so that the roots are the last columns of all. ``Packed``: all documents one after the other
in one row, so that no linear layer sees padding; only attention looks at them one by one, through rectangles
that are gathered from the row, and no document sees another (the document mask).

Shapes: B documents, C context positions of the longest, R roots of the richest; P positions and Q roots of a
packed row; "..." trailing dimensions.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Layout(Protocol):
    """What an :class:`~tide_platform.draft.eagle3.Unroll` asks of a layout."""

    positions: torch.Tensor  # int64, absolute, of the context rows: [B, C] or [1, P]
    visible_BRC: torch.Tensor  # bool: which context rows of its document a root sees at step 0

    def roots(self, x: torch.Tensor) -> torch.Tensor:
        """The root rows of what has a value for each context row."""
        ...

    def context_rectangle(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, ...] of what has a value for each context row."""
        ...

    def root_rectangle(self, x: torch.Tensor) -> torch.Tensor:
        """[B, R, ...] of what has a value for each root."""
        ...

    def root_rows(self, x_BR: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`root_rectangle`."""
        ...


class LeftPadded:
    """Rows are rectangles already."""

    def __init__(self, positions_BC: torch.Tensor, key_mask_BC: torch.Tensor, roots: int):
        """``key_mask_BC`` false where there is no aux row (padding, holes); ``roots``: R."""
        context = positions_BC.shape[1]
        causal_RC = torch.ones(roots, context, dtype=torch.bool, device=positions_BC.device)
        self.positions, self._roots = positions_BC, roots
        self.visible_BRC = causal_RC.tril(context - roots) & key_mask_BC[:, None, :]

    def roots(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -self._roots :]

    def context_rectangle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def root_rectangle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def root_rows(self, x_BR: torch.Tensor) -> torch.Tensor:
        return x_BR


class Packed:
    """One row of documents. Padding exists in the rectangles alone: there it is row 0, seen by nobody."""

    def __init__(
        self,
        positions_1P: torch.Tensor,
        key_mask_1P: torch.Tensor,
        contexts: Sequence[int],
        roots: Sequence[int],
    ):
        """``contexts``: positions of each document, P in all; ``roots``: how many of its last are roots."""
        device = positions_1P.device
        length_B1 = torch.tensor(contexts, device=device)[:, None]
        roots_B1 = torch.tensor(roots, device=device)[:, None]
        context_C = torch.arange(max(contexts), device=device)
        root_R = torch.arange(max(roots), device=device)
        inside_BC, inside_BR = context_C < length_B1, root_R < roots_B1
        start_B1, root_start_B1 = (n_B1.cumsum(0) - n_B1 for n_B1 in (length_B1, roots_B1))
        column_BR = length_B1 - roots_B1 + root_R
        self.positions = positions_1P
        self._context_BC = (start_B1 + context_C) * inside_BC
        self._root_BR = (root_start_B1 + root_R) * inside_BR
        self._root_P = (start_B1 + column_BR)[inside_BR]  # of each root, its place in the row
        self._flat_Q = torch.arange(inside_BR.numel(), device=device)[inside_BR.flatten()]
        key_BC = self.context_rectangle(key_mask_1P) & inside_BC
        self.visible_BRC = (context_C <= column_BR[:, :, None]) & key_BC[:, None]

    def roots(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(1, self._root_P)

    def context_rectangle(self, x: torch.Tensor) -> torch.Tensor:
        return _gather(x, self._context_BC)

    def root_rectangle(self, x: torch.Tensor) -> torch.Tensor:
        return _gather(x, self._root_BR)

    def root_rows(self, x_BR: torch.Tensor) -> torch.Tensor:
        return x_BR.flatten(0, 1).index_select(0, self._flat_Q)[None]


def _gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a packed x [1, P, ...] as a rectangle of the shape of ``index``."""
    return x[0].index_select(0, index.flatten()).unflatten(0, index.shape)
