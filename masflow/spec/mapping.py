"""The mapping document: which role is played by which model or adapter, and who learns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from masflow.spec.base import Spec

Roles = Literal["rest"] | tuple[str, ...]
"""Role names or globs, or `rest`: every role that nothing else names."""


class Optimizer(Spec):
    """AdamW and its schedule, which follows the run's step."""

    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-8, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_frac: float = Field(0.0, ge=0, le=1)
    """Where the schedule ends, as a share of `lr`."""
    max_grad_norm: float = Field(1.0, gt=0)


class Lora(Spec):
    """Adapter shape (PEFT)."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class Wordpiece(Spec):
    """A WordPiece vocabulary of whole words and single characters, made from text files (JSON Lines `text`)."""

    files: tuple[str, ...]
    whole_words: bool = True
    size: int | None = None


class TokenizerSpec(Spec):
    wordpiece: Wordpiece


class BaseInit(Spec):
    embedding_std: float | None = Field(None, gt=0)


class ConfigBase(Spec):
    """A small model made from a config, once a seed, in the run's folder."""

    config: dict[str, Any]
    """Keyword arguments of the Hugging Face config class of `model_type`."""
    init: BaseInit = BaseInit()
    freeze: tuple[Literal["embeddings"], ...] = ()
    tokenizer: TokenizerSpec | str
    """How to make one, or a folder or id to load."""


class Model(Spec):
    """One physical model (or, with `per: role`, one a role)."""

    roles: Roles
    per: Literal["role"] | None = None
    base: str | ConfigBase | None = None
    """A folder, a Hugging Face id, or a config; default: the experiment's `base`."""
    train: Literal["full", "lora", "frozen"] = "full"
    lora: Lora = Lora()
    adapters: Literal["per_role"] | dict[str, Roles] | None = None
    """With `train: lora`: one adapter a role, or by group; default: one adapter."""
    optimizer: Optimizer | None = None
    """Default: the experiment's."""
    init: str | None = None
    """`RUN` or `RUN@step`: start from an earlier run's policy."""
    context: int | None = Field(None, ge=8)
    """Window in tokens; default: what the base says."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"


class Mapping(Spec):
    """A whole mapping."""

    models: dict[str, Model]
