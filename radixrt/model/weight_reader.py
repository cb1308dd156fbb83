"""WeightReader reads a model's tensors by name: each is checked against the shape the config says, and none is left unread."""

from __future__ import annotations

import re
from typing import Protocol

import torch

from radixrt.errors import ModelError
from radixrt.model.config import ModelConfig

# Where the text model is in a model of several parts, as old and new files have it; and the other parts, which are not read.
_INSIDE = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
)
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class TensorSource(Protocol):
    """Where weights come from, by their Hugging Face names."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...


class WeightReader:
    """Reads the tensors of ``config`` by name, each checked against the shape the config says; ``finish`` finds those nobody read.

    Raises:
        ModelError: a tensor is missing, has another shape than the config says or no place in it; names it.
    """

    def __init__(self, config: ModelConfig, source: TensorSource) -> None:
        self.config = config
        self.source = source
        self._names = set(source.names())
        self._unread = set(self._names)
        self._inside: dict[str, str] = {}
        for inside in _INSIDE:
            if inside["model."] + "embed_tokens.weight" in self._names:
                self._inside = inside
                self._unread = {name for name in self._names if not _OTHER_PARTS.match(name)}

    def has(self, name: str) -> bool:
        return self._own(name) in self._names

    def check(self, name: str, *shape: int) -> str:
        """The source's name of ``name``, if there is such a tensor of this shape; it counts as read."""
        name = self._own(name)
        if name not in self._names:
            raise ModelError(f"the model has no tensor {name!r}")
        self._unread.discard(name)
        found = tuple(self.source.shape(name))
        if found != shape:
            raise ModelError(f"tensor {name!r} has shape {list(found)}, the config says {list(shape)}")
        return name

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.source.tensor(self.check(name, *shape), dtype)

    def finish(self) -> None:
        """A tensor that nobody read means that the config describes another model than the one in the files."""
        left = {
            name for name in self._unread if not name.endswith("rotary_emb.inv_freq")
        }  # computed, some files keep it
        if self.config.tie_embeddings:
            self._check_tied()
            left.discard(self._own("lm_head.weight"))
        if not left:
            return
        name = min(left)
        layer = re.search(r"model\.layers\.(\d{1,9})\.", name)
        if layer and int(layer[1]) >= self.config.num_layers:
            reason = f"num_hidden_layers={self.config.num_layers} leaves it out"
        else:
            reason = f"the config, or the {self.config.family.name} family, has no place for it"
        others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise ModelError(f"tensor {name!r}{others} would be ignored: {reason}")

    def _check_tied(self) -> None:
        """A head that some files keep beside the embeddings it is tied to: equal, or it is not tied."""
        head, embed = self._own("lm_head.weight"), self._own("model.embed_tokens.weight")
        if head not in self._names:
            return
        one, other = (self.source.tensor(name, torch.float32) for name in (head, embed))
        if not torch.equal(one, other):
            raise ModelError(
                f"tensor {head!r} differs from {embed!r}, to which it is tied: tie_word_embeddings must be false"
            )

    def _own(self, name: str) -> str:
        for ours, theirs in self._inside.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name
