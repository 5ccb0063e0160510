"""`dense`: search over a fixed corpus by the nearness of embeddings, exact.

Passages are embedded once, kept in the cache folder and memory-mapped from there. Torch is loaded with the
first search, never before. Legend: P passages, B texts of one batch, T tokens, D the embedding's size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from masflow.errors import RunError
from masflow.spec.retrieval import DenseSettings
from masflow.tools.corpus import StoredPassages, read_corpus, save_passages, searched_texts, stamp
from masflow.tools.search import found
from masflow.tools.stored import content_key, stored

__all__ = ["Dense", "Embedder", "make", "nearest"]

LAYOUT = 1
VECTORS = "embeddings.npy"
BLOCK_ROWS = 8192
USUAL_TOKENS = 512
"""Of a text, where neither the settings nor the model say less."""
DIGITS = 6
"""Scores are rounded to so many decimals, and equal ones stand in corpus order."""


def make(settings: dict[str, Any]) -> Dense:
    """The tool `dense`.

    Raises:
        SpecError: the corpus is missing or has a bad row.
        RunError: the model can't be loaded, or embeds to numbers that aren't finite.
    """
    return Dense(DenseSettings.model_validate(settings))


class Dense:
    """`dense(query=…)` gives passages, nearest first; equal scores stand in corpus order."""

    def __init__(self, settings: DenseSettings):
        path = Path(settings.corpus)
        self.settings = settings
        self.embedder = _embedder(
            settings.model, settings.pooling, settings.normalize, settings.max_tokens, settings.device
        )
        asked = settings.model_dump_json(exclude={"top_k", "query_prefix"})
        self.passages, self.vectors_PD = _embedded(str(path), stamp(path), asked)
        self.embedder.load()  # here, where no time limit of a call runs

    def __call__(self, query: str) -> dict[str, Any]:
        if not isinstance(query, str):
            raise TypeError(f"query must be text, got {query!r}")
        query_D = self.embedder([self.settings.query_prefix + query], 1)[0]
        if not query_D.any():  # no token, no direction
            return found(self.passages, [])
        return found(self.passages, nearest(self.vectors_PD, query_D, self.settings.top_k))


def nearest(vectors_PD: np.ndarray, query_D: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """(row, inner product) of the largest, best first, ties after rounding to the earlier row.

    A float32 matrix product finds every row that can be among them, given its rounding error; float64 sums,
    the same for each row wherever it stands, order those. So threads and block sizes change nothing.

    Args:
        vectors_PD: (P, D) float16 or float32, maybe memory-mapped; read in blocks.
        query_D: (D,) float32.
    """
    scores_P = np.empty(len(vectors_PD), dtype=np.float32)
    largest = 0.0
    for start in range(0, len(vectors_PD), BLOCK_ROWS):
        block_BD = np.asarray(vectors_PD[start : start + BLOCK_ROWS], dtype=np.float32)
        scores_P[start : start + BLOCK_ROWS] = block_BD @ query_D
        largest = max(largest, float(np.einsum("bd,bd->b", block_BD, block_BD).max()) ** 0.5)
    size = len(query_D)
    # |fl(x·y) - x·y| ≤ D ε |x||y| for any order of summation (Higham 2002, section 3.1)
    slack = 2 * size * float(np.finfo(np.float32).eps) * largest * float(np.linalg.norm(query_D))
    slack += 10.0**-DIGITS
    rows = np.arange(len(scores_P))
    if len(rows) > top_k:
        cut = np.partition(scores_P, len(rows) - top_k)[len(rows) - top_k]
        rows = np.flatnonzero(scores_P >= cut - slack)
    exact = (np.asarray(vectors_PD[rows], dtype=np.float64) * query_D.astype(np.float64)).sum(axis=1)
    rounded = np.round(exact, DIGITS)
    best = np.argsort(-rounded, kind="stable")[:top_k]
    return [(int(rows[i]), float(rounded[i])) for i in best]


class Embedder:
    """Texts to vectors by a Hugging Face model, in float32; the model is loaded with the first text."""

    def __init__(self, model: str, pooling: str, normalize: bool, max_tokens: int | None, device: str):
        self.name, self.pooling, self.normalize = model, pooling, normalize
        self.max_tokens, self.device = max_tokens, device
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str], batch: int) -> np.ndarray:
        """(P, D) float32, in the order of the texts, cut at `max_tokens`; zeros for one without tokens."""
        tokenizer, model = self.load()
        with self._lock:
            ids = tokenizer(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
            lengths = [len(one) for one in ids]
            order = sorted((i for i in range(len(texts)) if lengths[i]), key=lambda i: lengths[i])
            vectors_PD = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
            for start in range(0, len(order), batch):
                rows = order[start : start + batch]  # of about equal lengths: little padding
                vectors_PD[rows] = self._embed(tokenizer, model, [texts[i] for i in rows])
        return vectors_PD

    def load(self) -> tuple[Any, Any]:
        """The tokenizer and the model, loaded once.

        Raises:
            RunError: they can't be.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = _load_model(self.name, self.device)
                if self.max_tokens is None:
                    config = self._loaded[1].config
                    room = getattr(config, "max_position_embeddings", None) or USUAL_TOKENS
                    self.max_tokens = min(USUAL_TOKENS, room)
            return self._loaded

    def _embed(self, tokenizer: Any, model: Any, texts: list[str]) -> np.ndarray:
        import torch

        kept = tokenizer(
            texts, truncation=True, max_length=self.max_tokens, padding=True, return_tensors="pt"
        )
        inputs = {name: kept[name].to(model.device) for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            hidden_BTD = model(**inputs).last_hidden_state.float()
            mask_BT = inputs["attention_mask"]
            vectors_BD = self._pooled(hidden_BTD, mask_BT)
            if self.normalize:
                vectors_BD = torch.nn.functional.normalize(vectors_BD, dim=-1)
        return vectors_BD.cpu().numpy()

    def _pooled(self, hidden_BTD: Any, mask_BT: Any) -> Any:
        """(B, D): padding stands on the right and takes no part."""
        if self.pooling == "cls":
            return hidden_BTD[:, 0]
        if self.pooling == "last":
            last_B = (mask_BT.sum(dim=1) - 1).clamp(min=0)
            return hidden_BTD[range(len(last_B)), last_B]
        weights_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
        return (hidden_BTD * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1).clamp(min=1)


def _load_model(name: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModel.from_pretrained(name, dtype=torch.float32).to(device).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        message = f"the embedding model {name} can't be used on {device}: {_first_line(error)}"
        raise RunError(message, "name a folder with config.json, weights and a tokenizer") from None
    tokenizer.padding_side, tokenizer.truncation_side = "right", "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer, model


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@lru_cache(maxsize=4)
def _embedder(model: str, pooling: str, normalize: bool, max_tokens: int | None, device: str) -> Embedder:
    return Embedder(model, pooling, normalize, max_tokens, device)


Embedded = tuple[Sequence[dict[str, Any]], np.ndarray]


@lru_cache(maxsize=4)
def _embedded(path: str, stamp: tuple[int, int], asked: str) -> Embedded:
    """The corpus and its (P, D) embeddings, by settings as JSON."""
    settings = DenseSettings.model_validate_json(asked)

    def made() -> Embedded:
        passages = read_corpus(Path(path), settings.text_field, settings.id_field)
        texts = searched_texts(passages, Path(path), settings.title_field)
        texts = [settings.passage_prefix + text for text in texts]
        once = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # equal texts, equal embeddings
        embedder = _embedder(
            settings.model, settings.pooling, settings.normalize, settings.max_tokens, settings.device
        )
        with np.errstate(over="ignore"):  # looked at below
            kept_PD = embedder(list(once), settings.batch).astype(settings.stored)
        if not np.isfinite(kept_PD).all():
            fix = "write 'stored: float32', or use another model"
            raise RunError(f"{settings.model} embeds some passages to numbers that aren't finite", fix)
        return passages, kept_PD[[once[text] for text in texts]]

    files, name = _model_files(settings.model)
    kept = settings.model_dump(mode="json", exclude={"corpus", "model", "top_k", "device", "query_prefix"})
    key = content_key([Path(path), *files], LAYOUT, name, kept, _versions())
    return stored("dense", key, made, _save, _load)


def _model_files(model: str) -> tuple[list[Path], str]:
    """What an embedding depends on: a folder's files, or an id with its current version."""
    if Path(model).is_dir():
        wanted = (".safetensors", ".bin", ".json", ".txt", ".model")
        return sorted(p for p in Path(model).iterdir() if p.is_file() and p.suffix in wanted), ""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RunError(
            f"the embedding model {model} can't be loaded: {said}", "name a model's folder"
        ) from None
    return [], f"{model}@{getattr(config, '_commit_hash', None)}"


def _versions() -> list[str]:
    import torch
    import transformers

    return [torch.__version__, transformers.__version__]


def _save(embedded: Embedded, folder: Path) -> None:
    passages, vectors_PD = embedded
    save_passages(passages, folder)
    np.save(folder / VECTORS, vectors_PD)


def _load(folder: Path) -> Embedded:
    passages, vectors_PD = StoredPassages(folder), np.load(folder / VECTORS, mmap_mode="r")
    if len(passages) != len(vectors_PD):
        raise ValueError(f"{len(passages)} passages, {len(vectors_PD)} embeddings")
    return passages, vectors_PD
